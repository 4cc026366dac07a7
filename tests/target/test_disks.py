"""Disks that are full, foreign, failing or without locks; kills between the steps of a pipeline; folder names."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crashes
import diffusers
import pytest
import small_sets
import toys
from handmade import raw_file
from small_pipelines import build_flux_pipeline
from stand_in_hub import StandInHub

import loader
import shardconv
from shardconv import CheckpointError, OutputError, SetError
from shardconv.cli.main import main
from shardconv.commands import convert as conversion
from shardconv.commands import rest
from shardconv.format.header import FileHeader
from shardconv.format.sets import sets_in
from shardconv.system.linux import sync_folder
from shardconv.target import checks
from shardconv.target import folder as destination
from shardconv.target.checks import copied_nbytes


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small FLUX pipeline with two transformers."""
    folder = tmp_path_factory.mktemp("disks") / "flux"
    build_flux_pipeline().save_pretrained(folder)
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"transformer_2": index["transformer"]}))
    (folder / "README.md").write_text("card")
    return folder


@pytest.fixture
def pipe(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "flux"))


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder on another file system than `tmp_path`."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


# Space


def _all(pipe: Path) -> int:
    inside = (path for path in pipe.rglob("*") if path.is_file() and "transformer" not in path.parts[-2])
    return sum(path.stat().st_size for path in inside)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["convert", "merge", "reshard"])
def test_what_will_be_copied_counts(
    pipe: Path, elsewhere: Path, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other components are copied to another file system: they count, before anything is written; on the same one
    they are linked and take nothing."""
    shardconv.convert(pipe, tmp_path / "sets", tp=2)
    work = {
        "convert": lambda out: shardconv.convert(pipe, out, tp=2),
        "merge": lambda out: shardconv.merge(tmp_path / "sets", out),
        "reshard": lambda out: shardconv.reshard(tmp_path / "sets", out, tp=4),
    }[verb]
    free = [0]
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free[0]))

    def needed(out: Path) -> int:
        free[0] = 0
        with pytest.raises(OutputError) as caught:
            work(out)
        assert not out.exists()
        return sum(int(word.replace(",", "")) for word in str(caught.value).split() if word.replace(",", "").isdigit())

    here, there = needed(tmp_path / "out"), needed(elsewhere / "out")
    assert there - here == _all(pipe)
    free[0] = there - 1
    with pytest.raises(OutputError, match="files to be copied beside it"):
        work(elsewhere / "out")
    free[0] = there
    work(elsewhere / "out")
    assert (elsewhere / "out" / "model_index.json").exists()


def test_a_cache_on_another_disk_counts_by_its_blobs(tmp_path: Path, elsewhere: Path, pipe: Path) -> None:
    """Links that lead to another disk, as those of a Hub cache, are copied like the files they lead to."""
    moved = shutil.move(pipe / "vae" / "diffusion_pytorch_model.safetensors", elsewhere / "blob")
    (pipe / "vae" / "diffusion_pytorch_model.safetensors").symlink_to(moved)
    assert copied_nbytes(pipe, tmp_path / "out", ["README.md"]) == 0
    names = ["README.md", "vae/diffusion_pytorch_model.safetensors"]
    assert copied_nbytes(pipe, tmp_path / "out", names) == (elsewhere / "blob").stat().st_size


# Kills


@pytest.mark.slow
def test_a_kill_leaves_no_pipeline(pipe: Path, tmp_path: Path) -> None:
    """Killed at any change to the disk between the first set and the end: what is there neither loads as a pipeline nor
    is sent to a repo; the next run ends as an undisturbed one."""
    shardconv.convert(pipe, tmp_path / "whole", tp=2)
    whole = toys.contents(tmp_path / "whole")
    out, between = tmp_path / "out", 0

    def work() -> None:
        crashes.steadily(1000)
        shardconv.convert(pipe, out, tp=2)

    for step in itertools.count(1, 9):
        if not crashes.killed_at(step, work):
            break
        if (out / "transformer" / "tp2").exists():
            between += 1
            if {name: held for name, held in toys.contents(out).items() if name != ".tp2.unfinished"} != whole:
                with pytest.raises(SetError, match="did not finish; run shardconv convert again"):
                    loader.load_pipeline(out, device="cpu")
                with pytest.raises(OSError, match="model_index"):
                    diffusers.DiffusionPipeline.from_pretrained(out)
                with pytest.raises(SetError, match="did not finish"):
                    shardconv.push(out, "org/name")
        shutil.rmtree(out, ignore_errors=True) if step % 4 else shardconv.convert(pipe, out, tp=2)
        if out.exists():
            assert toys.contents(out) == whole
            shutil.rmtree(out)
    assert between > 2


@pytest.mark.slow
def test_what_was_begun_is_finished_by_the_next_run(
    pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fails between two sets leaves a mark, by which push refuses; a set of another degree may be sent where
    a whole pipeline was there before; the next run of the same kind takes the mark away."""
    out, real = tmp_path / "out", conversion._execute
    shardconv.convert(pipe, out, tp=4)

    def failing(job: Any, *others: Any) -> Any:
        if job.component == "transformer_2":
            raise OutputError("no")
        return real(job, *others)

    monkeypatch.setattr(conversion, "_execute", failing)
    with pytest.raises(OutputError):
        shardconv.convert(pipe, out, tp=2)
    monkeypatch.setattr(conversion, "_execute", real)
    from shardconv.commands.sendable import sendable

    with pytest.raises(SetError, match="the conversion for tp degree 2 did not finish"):
        sendable(out, None)
    assert {each.manifest.tp_degree for each in sendable(out, [4]).sets} == {4}
    shardconv.convert(pipe, out, tp=2)
    assert {each.manifest.tp_degree for each in sendable(out, None).sets} == {2, 4}


# Several at once


def test_downloads_of_two_runs_do_not_meet(tmp_path: Path) -> None:
    """Two runs into one OUT have a folder each for what they download; that of a killed run goes."""
    killed = tmp_path / ".shardconv.source-gone"
    killed.mkdir()
    (killed / "half").write_bytes(b"1")
    with rest._own_staging(tmp_path) as one, rest._own_staging(tmp_path) as other:
        assert one != other
        assert not killed.exists()
        (one / "file").write_bytes(b"1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_low_disk_runs_into_one_out(hub: StandInHub, client: Any, pipe: Path, tmp_path: Path) -> None:
    """Two degrees of one repo converted at once into one OUT: both end well, nothing of a download is left."""
    import hub_clients

    hub.add_folder("org/flux", pipe)
    command = [sys.executable, "-m", "shardconv", "convert", "--low-disk", "--quiet", "org/flux", str(tmp_path / "out")]
    environment = hub_clients.environment(client)
    runs = [subprocess.Popen([*command, "--tp", tp], env=environment) for tp in ("2", "4")]
    assert [run.wait(120) for run in runs] == [0, 0]
    assert not list((tmp_path / "out").rglob(".*"))
    shardconv.verify(tmp_path / "out", source=pipe)


PRETENDING = "int flock(int fd, int operation) { return 0; }\n"


@pytest.fixture(scope="module")
def pretending(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which every lock is granted, as on some network file systems."""
    folder = tmp_path_factory.mktemp("locks")
    (folder / "flock.c").write_text(PRETENDING)
    library = folder / "flock.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, folder / "flock.c"], check=True)
    return dict(os.environ, LD_PRELOAD=str(library))


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.3, 1.0])
def test_of_two_conversions_without_locks_one_succeeds(
    pretending: dict[str, str], delay: float, tmp_path: Path
) -> None:
    """Where every lock is granted, two conversions into one OUT do not spoil each other: at least one ends with the
    set, and one that does not says why."""
    import time

    source, out = small_sets.source("flux"), tmp_path / "out"
    command = [sys.executable, "-m", "shardconv", "convert", "--tp", "2", "--quiet", str(source), str(out)]
    runs = []
    for _ in range(2):
        runs.append(subprocess.Popen(command, env=pretending, stderr=subprocess.PIPE, text=True))
        time.sleep(delay)
    said = [run.communicate(timeout=120)[1] for run in runs]
    assert 0 in [run.returncode for run in runs], said
    for run, text in zip(runs, said, strict=True):
        assert run.returncode == 0 or "another process" in text
    shardconv.verify(out, source=source)
    assert {path.name for path in out.iterdir()} == {"config.json", "tp2"}


@pytest.mark.slow
def test_a_leftover_without_locks_is_named(pretending: dict[str, str], tmp_path: Path) -> None:
    """Where locks mean nothing, a folder under construction may be somebody's: it is named, and removing it helps."""
    source, out = small_sets.source("flux"), tmp_path / "out"
    (out / ".tp2.partial").mkdir(parents=True)
    command = [sys.executable, "-m", "shardconv", "convert", "--tp", "2", "--quiet", str(source), str(out)]
    done = subprocess.run(command, env=pretending, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{out / '.tp2.partial'}: another process is writing here, or was killed" in done.stderr
    (out / ".tp2.partial").rmdir()
    assert subprocess.run(command, env=pretending, check=False).returncode == 0


# Whose fault it is


@pytest.mark.parametrize(
    ("verb", "kind"), [("convert", CheckpointError), ("reshard", CheckpointError), ("merge", CheckpointError)]
)
def test_a_read_fault_is_the_sources(verb: str, kind: type[Exception], tmp_path: Path, monkeypatch: Any) -> None:
    """A file that cannot be read is named as what it is; OUT is not accused, and nothing is left in it."""
    source, out = small_sets.source("flux"), tmp_path / "out"
    sets = small_sets.converted("flux", 2)
    work = {
        "convert": lambda: shardconv.convert(source, out, tp=2),
        "reshard": lambda: shardconv.reshard(sets, out, tp=4),
        "merge": lambda: shardconv.merge(sets, out),
    }[verb]

    def preadv(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(kind, match=r"\.safetensors: cannot be read \(Input/output error\)") as caught:
        work()
    assert "left behind" not in str(caught.value)
    assert str(out) not in str(caught.value)
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_fault_after_the_rename_does_not_claim_that_nothing_is_left(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the folder cannot be synced after the set has its name, the set is there, and the message says so."""
    source, out = small_sets.source("flux"), tmp_path / "out"
    if overwrite:
        shardconv.convert(source, out, tp=2)
    real = sync_folder

    def sync(folder: Path) -> None:
        if folder == out:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(folder)

    monkeypatch.setattr(destination, "sync_folder", sync)
    with pytest.raises(OutputError, match="Input/output error; it is complete, but may not outlast a power loss"):
        shardconv.convert(source, out, tp=2, dtype="bf16", overwrite=overwrite)
    shardconv.verify(out)


# Names and places


def test_merge_leaves_its_source_alone(tmp_path: Path) -> None:
    """OUT in what is read, or that itself, by whatever name, is refused and nothing is touched."""
    component = small_sets.copied(small_sets.converted("flux", 2), tmp_path / "component")
    (tmp_path / "link").symlink_to(component)
    before = toys.contents(component)
    for path in (component, component / "tp2", tmp_path / "link"):
        for out in (
            component / "merged",
            component / "tp2" / "merged",
            component / "tp2",
            tmp_path / "link" / "merged",
        ):
            with pytest.raises(OutputError):
                shardconv.merge(path, out)
    assert toys.contents(component) == before


@pytest.mark.parametrize("name", ["tp04", "tp0", "tp", "tp4x", "TP4", "tp-4", "tp\uff14", "tp4.partial"])
def test_only_one_spelling_is_a_set(name: str, tmp_path: Path) -> None:
    """A folder that is not named as convert names it is no set to anybody: it is not found, listed, read or sent."""
    from shardconv.commands.sendable import sendable
    from shardconv.remote.store import Listing, RemoteFile, degrees_in

    component = small_sets.copied(small_sets.converted("flux", 4), tmp_path / "component")
    (component / "tp4").rename(component / name)
    assert sets_in(component) == {}
    files = {f"transformer/{name}/shardconv.json": RemoteFile("x", 1, "")}
    assert degrees_in(Listing("", files, ""), "transformer") == {}
    for look in (
        shardconv.verify,
        lambda path: sendable(path, None),
        lambda path: loader.load_model(path, device="cpu"),
    ):
        with pytest.raises(SetError, match="no converted set in it"):
            look(component)


def test_a_header_over_the_limit_is_told_its_length(tmp_path: Path) -> None:
    """A header of more than readers take is called that, with its length and the limit."""
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        file.write(raw_file(b'{"a":1', length=150_000_000))
        file.truncate(160_000_000)
    with pytest.raises(CheckpointError, match=r"its header takes 150,000,000 bytes, .* at most 100,000,000"):
        FileHeader.read(path)


# Variants


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_a_variant_that_nothing_has(pipe: Path, option: list[str], tmp_path: Path, capsys: Any) -> None:
    """A pipeline none of whose components has the variant: an error that lists those there are; one will do."""
    argv = ["convert", "--tp", "2", "--variant", "fp61", *option, str(pipe), str(tmp_path / "out")]
    (pipe / "vae" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"")
    assert main(argv) == 1
    assert f"{pipe}: expected weights of variant 'fp61', found the default ones, fp16" in capsys.readouterr().err
    argv[4] = "fp16"
    assert main(argv) == 0


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--dry-run", "--low-disk", "--quiet"])
def test_a_variant_that_a_repo_lacks(
    hub: StandInHub, client: Any, pipe: Path, option: str, tmp_path: Path, capsys: Any
) -> None:
    """The same of a repo, by its listing, whatever of it is fetched."""
    (pipe / "text_encoder" / "model.bf16.safetensors").write_bytes(b"")
    hub.add_folder("org/flux", pipe)
    assert main(["convert", "--tp", "2", "--variant", "fp16", option, "org/flux", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "org/flux at" in said
    assert "expected weights of variant 'fp16', found the default ones, bf16" in said


# Overwriting


@pytest.mark.slow
def test_overwrite_covers_the_rest_of_the_pipeline(pipe: Path, tmp_path: Path, capsys: Any) -> None:
    """A scheduler's config that changed in the source, and a card that somebody edited in OUT, are refused by name
    without --overwrite and replaced with it; other files of OUT stay."""
    out = tmp_path / "out"
    shardconv.convert(pipe, out, tp=2)
    for path in (pipe / "scheduler" / "scheduler_config.json", out / "README.md"):
        text = path.read_text()
        path.unlink()
        path.write_text(text + " ")
    (out / "notes.txt").write_text("mine")
    for argv in ([], ["--dry-run"]):
        assert main(["convert", "--tp", "2", "--quiet", *argv, str(pipe), str(out)]) == 1
        said = capsys.readouterr().err
        assert "scheduler_config.json: differs from" in said
        assert "README.md: differs from" in said
        assert said.count("or add --overwrite") == 2
    shardconv.convert(pipe, out, tp=2, overwrite=True)
    for name in ("scheduler/scheduler_config.json", "README.md"):
        assert (out / name).read_bytes() == (pipe / name).read_bytes()
    assert (out / "notes.txt").read_text() == "mine"
    (out / "README.md").unlink()
    (out / "README.md").write_text("edited")
    shardconv.reshard(pipe.parent / "out", tmp_path / "other", tp=4)
    (tmp_path / "other" / "README.md").unlink()
    (tmp_path / "other" / "README.md").write_text("else")
    with pytest.raises(OutputError, match="add --overwrite"):
        shardconv.reshard(out, tmp_path / "other", tp=4)
    shardconv.reshard(out, tmp_path / "other", tp=4, overwrite=True)
    assert (tmp_path / "other" / "README.md").read_text() == "edited"
