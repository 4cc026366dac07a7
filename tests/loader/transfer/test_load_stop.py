"""Whatever moves bytes ends within seconds: after a failure of another rank, an error here, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hub_clients
import late_device
import pytest
import ranks
import small_sets
import torch.distributed as dist
from stand_in_hub import File, StandInHub

import loader
from loader import load, pipeline
from loader.files import validate
from shardconv import HubError, SetError

NAME = "qwenimage"
SOON = 3  # seconds from what goes wrong to the end
LONG = 30  # seconds that a read, a digest or an answer takes that should not be waited for
REPO = "org/tiny-tp"

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def hanging(owner: Any, name: str, cue: threading.Event | None = None) -> Iterator[None]:
    """`owner.name` hangs while this lasts, and sets `cue`."""
    over = threading.Event()

    def hang(*args: Any, **options: Any) -> Any:
        if cue is not None:
            cue.set()
        over.wait(LONG)
        raise OSError("never seen")

    with mock.patch.object(owner, name, hang):
        try:
            yield
        finally:
            over.set()


# What hangs -> how, with which options of `load_model`, of the set for how many times the ranks; on the device last
HANGS: dict[str, tuple[Callable[[threading.Event | None], Any], dict[str, Any], int]] = {
    "read": (lambda cue: hanging(os, "preadv", cue), {"transfer": "read"}, 1),
    "join": (lambda cue: hanging(os, "preadv", cue), {}, 2),
    "verify": (lambda cue: hanging(validate, "_digest", cue), {"verify": True}, 1),
    "cast": (lambda cue: hanging(load, "_cast", cue), {"dtype": "bfloat16"}, 1),
    "ring": (lambda cue: hanging(os, "preadv", cue), {"device": "late:0"}, 1),
    "copy": (lambda cue: hanging(late_device, "_copy", cue), {"device": "late:0", "transfer": "mmap"}, 1),
}


def each_hang() -> Iterator[tuple[str, Callable[[threading.Event | None], Any]]]:
    """What hangs and how, on a device that stays installed from its first use on."""
    with contextlib.ExitStack() as stack:
        for what, (hang, options, _) in HANGS.items():
            if "device" in options and what == "ring":
                stack.enter_context(late_device.installed())
            yield what, hang


def load_by(path: Path, what: str, ranks_in_all: int) -> None:
    import torch

    _, options, times = HANGS[what]
    named = {key: getattr(torch, value) if key == "dtype" else value for key, value in options.items()}
    loader.load_model(path / f"tp{ranks_in_all * times}", **({"device": "cpu"} | named))


def end_by_the_other(path: Path) -> dict[str, tuple[float, str]]:
    """Rank 1 fails while rank 0 hangs, once in each way: seconds after that, and what was raised."""
    ended = {}
    for what, hang in each_hang():
        dist.barrier()
        failing = mock.patch.object(load, "open_set", side_effect=lambda *args: fail_later())
        start = time.monotonic()
        with failing if dist.get_rank() else hang(None):
            try:
                load_by(path, what, 2)
            except Exception as error:
                ended[what] = (time.monotonic() - start - LATER, str(error))
    return ended


LATER = 0.2  # seconds into the loading of the others


def fail_later() -> None:
    time.sleep(LATER)
    raise SetError("no such luck")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one small model, for 1, 2 and 4 ranks."""
    out = tmp_path_factory.mktemp("sets")
    for tp in (1, 2, 4):
        small_sets.copied(small_sets.converted(NAME, tp) / f"tp{tp}", out / f"tp{tp}")
    (out / "config.json").write_bytes((small_sets.converted(NAME, 1) / "config.json").read_bytes())
    return out


@pytest.mark.late
def test_a_failure_elsewhere_ends_it(sets: Path) -> None:
    """Rank 1 fails in the middle of what rank 0 reads, joins, hashes, casts or copies: both end with its reason."""
    for ended in ranks.values(end_by_the_other, sets):
        assert {what: text for what, (_, text) in ended.items()} == dict.fromkeys(HANGS, "rank 1: no such luck")
        assert {what: seconds for what, (seconds, _) in ended.items() if seconds > SOON} == {}


AFTER_THE_MODEL = ("join", "cast")  # what begins when the model has been found to fit


def interrupt(path: Path, way: str) -> dict[str, float]:
    """Seconds from Ctrl-C, or from an error of this rank, to the end of a load that hangs, for each way to hang."""
    ended = {}
    for what, hang in each_hang():
        if way == "error" and what in AFTER_THE_MODEL:
            continue
        cue, at = threading.Event(), [0.0]

        def press(cue: threading.Event = cue, at: list[float] = at) -> None:
            cue.wait(LONG)
            at[0] = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)

        def refuse(*args: Any, cue: threading.Event = cue, at: list[float] = at) -> None:
            cue.wait(LONG)
            at[0] = time.monotonic()
            raise SetError("another model")

        wrong = mock.patch.object(load, "check_model", refuse) if way == "error" else contextlib.nullcontext()
        if way == "interrupt":
            threading.Thread(target=press, daemon=True).start()
        with hang(cue), wrong:
            try:
                load_by(path, what, 1)
            except (KeyboardInterrupt, SetError) as error:
                ended[f"{what}: {type(error).__name__}"] = time.monotonic() - at[0]
    return ended


@pytest.mark.late
@pytest.mark.parametrize(("way", "raised"), [("interrupt", "KeyboardInterrupt"), ("error", "SetError")])
def test_an_interrupt_or_an_error_here_ends_it(sets: Path, way: str, raised: str) -> None:
    """Ctrl-C, or a fault that this rank finds meanwhile, is raised though a read, a digest or a copy hangs."""
    [ended] = ranks.values(interrupt, sets, way, n=1, group=False, env={"WORLD_SIZE": "1"})
    assert set(ended) == {f"{what}: {raised}" for what in HANGS if way == "interrupt" or what not in AFTER_THE_MODEL}
    assert {what: seconds for what, seconds in ended.items() if seconds > SOON} == {}


def die_elsewhere(path: Path) -> str:
    """Rank 1 is killed while rank 0 hangs."""
    if dist.get_rank():
        with mock.patch.object(load, "open_set", side_effect=lambda *args: (time.sleep(LATER), os._exit(3))):
            load_by(path, "read", 2)
    with hanging(os, "preadv"):
        load_by(path, "read", 2)
    return "loaded"


def test_the_death_of_a_rank_ends_it(sets: Path) -> None:
    """A rank that hangs in reading is told of another whose process has ended, though nobody else could see it."""
    left, dead = ranks.run(die_elsewhere, sets)
    assert dead.error == "killed"
    assert left.error == "LoadError"
    assert left.text.startswith("rank 1: its process (")
    assert left.seconds < LATER + SOON


def interrupt_one_that_waits(path: Path) -> float:
    """Ctrl-C on rank 1, which is done and waits for rank 0, which hangs."""
    start = time.monotonic()
    if dist.get_rank():
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with contextlib.suppress(KeyboardInterrupt):
            load_by(path, "read", 2)
    else:
        with hanging(os, "preadv"), contextlib.suppress(loader.load.LoadError):
            load_by(path, "read", 2)
    return time.monotonic() - start - 1.0


def test_an_interrupt_of_a_rank_that_waits_is_told(sets: Path) -> None:
    """A rank that is done, and interrupted while it waits, does not leave the others to their work."""
    assert all(seconds < SOON for seconds in ranks.values(interrupt_one_that_waits, sets))


# --- downloads ---


@pytest.fixture
def stuck(hub: StandInHub, sets: Path) -> Iterator[Callable[[str], threading.Event]]:
    """Has the Hub, which holds `sets`, send nothing of a file; the value is set when it was asked for it."""
    hub.add_folder(REPO, sets)
    over = threading.Event()

    def stick(name: str) -> threading.Event:
        asked = threading.Event()

        def watch(stage: str, request: Any) -> None:
            if stage == "end" and request.method == "GET" and request.path.endswith(name):
                asked.set()
                over.wait(LONG)

        hub.watch = watch
        return asked

    yield stick
    over.set()


def load_repo(settings: dict[str, str]) -> None:
    hub_clients.point_at(settings)
    loader.load_model(REPO, device="cpu")


def test_a_failure_elsewhere_ends_a_download(hub: StandInHub, stuck: Any, tmp_path: Path) -> None:
    """Rank 0 waits for its own file, of which the Hub sends nothing, when the Hub refuses rank 1 its own."""
    stuck("tp2/rank-00000-of-00002.safetensors")
    hub.fail("HEAD", "tp2/rank-00001", status=410, times=9)
    outcomes = ranks.run(load_repo, hub.settings(tmp_path / "home"))
    assert "rank 1: " in (text := ranks.same(outcomes).text)
    assert "status 410" in text
    assert [each.seconds < 2 * SOON for each in outcomes] == [True, True]  # the listing and what is small come first


def test_an_error_of_one_file_does_not_wait_for_the_others(
    hub: StandInHub, client: Any, stuck: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two files one is refused and one never comes: the refusal is raised at once."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    repo = hub.repos[REPO]
    repo.commit(repo.files() | {"tp1/replicated.safetensors": File("x.safetensors", b"x" * 100)}, "shared")
    hub.objects |= {file.sha256: file for file in repo.files().values() if file.is_lfs}
    stuck("tp1/replicated.safetensors")
    hub.fail("HEAD", "tp1/rank-00000", status=410, times=9)
    start = time.monotonic()
    with pytest.raises(HubError, match="status 410"):
        loader.load_model(REPO, device="cpu")
    assert time.monotonic() - start < SOON


def test_ctrl_c_ends_a_download_of_the_command_line(hub: StandInHub, stuck: Any, tmp_path: Path) -> None:
    """`shardconv convert` of a repo, interrupted in a download, is gone soon: nothing waits at the end either."""
    hub.add_folder("org/source", small_sets.source(NAME))
    asked = stuck("diffusion_pytorch_model.safetensors")
    command = [sys.executable, "-m", "shardconv", "convert", "--tp", "2", "org/source", str(tmp_path / "out")]
    env = hub_clients.environment(hub.settings(tmp_path / "home"))
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert asked.wait(LONG)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LONG)
        assert time.monotonic() - start < SOON
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert said.startswith("shardconv: stopped; ")


# --- what diffusers loads ---


def assemble(path: Path) -> float:
    """Rank 0 hangs in diffusers, rank 1 fails there."""
    start = time.monotonic()
    acts = {
        0: hanging(pipeline, "_from_pretrained"),
        1: mock.patch.object(pipeline, "_from_pretrained", fail_in_loading),
    }
    with acts[dist.get_rank()], contextlib.suppress(loader.load.LoadError):
        loader.load_pipeline(path, device="cpu")
    return time.monotonic() - start - LATER


def fail_in_loading(*args: Any) -> None:
    fail_later()


def test_a_failure_elsewhere_ends_what_diffusers_loads(sets: Path, tmp_path: Path) -> None:
    """A text encoder that comes from a slow disk on one rank is not awaited when another rank lacks its own."""
    small_sets.copied(sets, tmp_path / "out" / "transformer")
    index = {"_class_name": "QwenImagePipeline", "transformer": ["diffusers", "QwenImageTransformer2DModel"]}
    (tmp_path / "out" / "model_index.json").write_text(json.dumps(index))
    assert all(seconds < SOON for seconds in ranks.values(assemble, tmp_path / "out"))
