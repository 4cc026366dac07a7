"""`convert --low-disk`: one weight file of a repo at a time on the disk, and none twice."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hub_clients
import pytest
import toys
from small_pipelines import build_flux_pipeline
from stand_in_hub import Repo, Request, StandInHub

from shardconv import HubError, OutputError, UsageError, convert
from shardconv.cli.main import main
from shardconv.commands import writer
from shardconv.remote import hub as hub_module

REPO = "org/tiny"
PART = {"subfolder": "transformer", "tp": 2}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pipeline whose transformer has three weight files."""
    folder = tmp_path_factory.mktemp("repo") / "tiny"
    build_flux_pipeline().save_pretrained(folder, max_shard_size="3MB")
    assert len(list(folder.glob("transformer/*.safetensors"))) == 3
    return folder


@pytest.fixture
def repo(hub: StandInHub, pipe: Path) -> Repo:
    return hub.add_folder(REPO, pipe)


def disk(*folders: Path) -> int:
    """Bytes that files take, those of several names once."""
    stats = {path: path.lstat() for folder in folders for path in folder.rglob("*") if path.is_file()}
    return sum(512 * blocks for blocks in {(s.st_dev, s.st_ino): s.st_blocks for s in stats.values()}.values())


def weights_of(hub: StandInHub) -> Counter[str]:
    """Weight files of the transformer that were sent whole, and how often; those read for their headers left out."""
    whole = [request for request in hub.log if request.method == "GET" and request.status == 200]
    names = [request.path.rpartition("/")[2] for request in whole if "/transformer/diffusion" in request.path]
    return Counter(name for name in names if name.endswith(".safetensors"))


def leftovers(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.name.endswith((".source", ".partial"))]


@pytest.mark.slow
@pytest.mark.parametrize("options", [PART, {"tp": 2}])
def test_the_result_is_that_of_an_ordinary_conversion(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    """A component and a whole pipeline, byte for byte; every file is fetched once, no weights come into the cache, and
    nothing is left over. A second run fetches none."""
    scarce = convert(REPO, tmp_path / "scarce", **options, low_disk=True)
    fetched = Counter(request.path for request in hub.log if request.method == "GET" and request.status == 200)
    assert set(fetched.values()) == {1}
    assert len(weights_of(hub)) == 3
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    assert not leftovers(tmp_path)
    hub.log.clear()
    assert convert(REPO, tmp_path / "scarce", **options, low_disk=True) == scarce
    assert not [request for request in hub.log if request.status == 200 and "/storage/" in request.path]
    assert convert(REPO, tmp_path / "ordinary", **options) == scarce
    assert toys.contents(tmp_path / "scarce") == toys.contents(tmp_path / "ordinary")


@pytest.mark.slow
def test_the_disk_holds_the_output_and_one_file(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path, pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at before and after each file is converted: what is written, one weight file, and little more."""
    seen: list[int] = []
    run = writer.engine.run

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(disk(tmp_path))
        result = run(*args, **options)
        seen.append(disk(tmp_path))
        return result

    monkeypatch.setattr(writer.engine, "run", watched)
    convert(REPO, tmp_path / "out", **PART, low_disk=True)
    assert len(seen) == 6
    largest = max(path.stat().st_size for path in pipe.glob("transformer/*.safetensors"))
    assert max(seen) <= disk(tmp_path / "out") + largest + 100_000


@pytest.mark.slow
@pytest.mark.parametrize("step", ["run", "download"])
def test_ctrl_c_leaves_nothing_or_says_what_stands(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Ctrl-C at the second weight file leaves no set and no download; after the set, at the pipeline's other files, it
    names the set. Either way the same command makes the whole afterwards."""
    out = tmp_path / "out"
    argv = ["convert", "--tp", "2", "--low-disk", "--quiet", REPO, str(out)]
    place = writer.engine if step == "run" else hub_module.Repo
    real = getattr(place, step)

    def stopped_at(number: int) -> str:
        calls = itertools.count(1)

        def stopped(*args: Any, **options: Any) -> Any:
            if next(calls) == number:
                raise KeyboardInterrupt
            return real(*args, **options)

        monkeypatch.setattr(place, step, stopped)
        assert main(argv) == 130
        assert not leftovers(tmp_path)
        return str(capsys.readouterr().err)

    assert stopped_at(2) == "shardconv: stopped; nothing half-done is left behind\n"
    assert not out.exists()
    if step == "download":
        assert stopped_at(4).startswith(f"shardconv: stopped; {out / 'transformer' / 'tp2'} stands complete, ")
    monkeypatch.setattr(place, step, real)
    assert main(argv) == 0
    assert main(["verify", "--quiet", str(out)]) == 0


def convert_killed(hub: StandInHub, settings: dict[str, str], out: Path, at: str) -> None:
    """The command line, killed when it asks for the content of a file."""
    argv = [sys.executable, "-m", "shardconv", "convert", "--tp", "2", "--low-disk", "--subfolder", "transformer"]
    process = subprocess.Popen([*argv, REPO, str(out)], env=hub_clients.environment(settings))

    def kill(stage: str, request: Request) -> None:
        if stage == "start" and request.method == "GET" and at in request.path and "/storage/" in request.path:
            starts.append(request.path)
            if len(starts) == 2:  # the first one is for the header
                process.send_signal(signal.SIGKILL)

    starts: list[str] = []
    hub.watch = kill
    assert process.wait(timeout=120) == -signal.SIGKILL
    hub.watch = None


@pytest.mark.slow
def test_killed_and_run_again_no_finished_file_is_downloaded_again(
    hub: StandInHub, repo: Repo, client: dict[str, str], tmp_path: Path
) -> None:
    """Killed while the second file comes, then while the third does: each run goes on with the file it was at."""
    out = tmp_path / "out"
    for at in ("-00002-of-00003", "-00003-of-00003"):
        convert_killed(hub, client, out, at)
        assert not (out / "transformer" / "tp2").exists()
    before = weights_of(hub)
    hub.log.clear()
    scarce = convert(REPO, out, **PART, low_disk=True)
    assert set(weights_of(hub)) == {"diffusion_pytorch_model-00003-of-00003.safetensors"}
    assert before["diffusion_pytorch_model-00001-of-00003.safetensors"] == 1
    assert before["diffusion_pytorch_model-00002-of-00003.safetensors"] == 2  # killed in the middle once
    assert convert(REPO, tmp_path / "ordinary", **PART) == scarce
    assert toys.contents(out) == toys.contents(tmp_path / "ordinary")


@pytest.mark.slow
def test_a_lost_connection_keeps_what_is_converted(hub: StandInHub, repo: Repo, client: Any, tmp_path: Path) -> None:
    """The third file cannot be had: an error, no set, and the next run fetches the third only. An altered one is not
    used either."""
    out = tmp_path / "out"
    third = r"/storage/.*-00003-of-00003"

    def fail_whole(stage: str, request: Request) -> None:  # its header, which is asked for first, is left alone
        if stage == "start" and request.method == "HEAD" and "-00003-of-00003" in request.path:
            hub.fail("GET", third, times=1, edit=lambda data: data[:-1] + b"?")
            hub.watch = None

    hub.watch = fail_whole
    with pytest.raises(HubError, match=r"-00003-of-00003.safetensors: arrived altered"):
        convert(REPO, out, **PART, low_disk=True)
    assert not (out / "transformer" / "tp2").exists()
    hub.log.clear()
    convert(REPO, out, **PART, low_disk=True)
    assert weights_of(hub) == {"diffusion_pytorch_model-00003-of-00003.safetensors": 1}
    assert not leftovers(tmp_path)


def test_another_commit_is_not_taken_for_the_same(hub: StandInHub, repo: Repo, client: Any, tmp_path: Path) -> None:
    """A set of an earlier commit stands there: refused without --overwrite."""
    convert(REPO, tmp_path / "out", **PART, low_disk=True)
    repo.commit(repo.files(), "again")
    with pytest.raises(OutputError, match="holds a conversion of another commit; add --overwrite to replace it"):
        convert(REPO, tmp_path / "out", **PART, low_disk=True)
    convert(REPO, tmp_path / "out", **PART, low_disk=True, overwrite=True)


def test_a_folder_needs_no_low_disk(pipe: Path, tmp_path: Path, capsys: Any) -> None:
    """A source that is here already: a mistake of the command line."""
    with pytest.raises(UsageError, match=r"--low-disk: of a Hub repo, .* is here already; leave it out"):
        convert(pipe, tmp_path / "out", tp=2, low_disk=True)
    assert main(["convert", "--tp", "2", "--low-disk", str(pipe), str(tmp_path / "out")]) == 2


def test_a_pipeline_does_not_overwrite_what_is_there(hub: StandInHub, repo: Repo, client: Any, tmp_path: Path) -> None:
    """A different file where one of the other components would go: named, nothing touched."""
    (tmp_path / "out" / "vae").mkdir(parents=True)
    (tmp_path / "out" / "vae" / "config.json").write_text("mine")
    with pytest.raises(OutputError, match=r"vae/config.json: differs from that of org/tiny; move it away"):
        convert(REPO, tmp_path / "out", tp=2, low_disk=True)
    assert toys.contents(tmp_path / "out").keys() == {"vae", "vae/config.json"}
