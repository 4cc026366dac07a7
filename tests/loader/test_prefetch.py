"""`loader.prefetch`: this rank's files come into the page cache while Python is still importing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loader
from loader.files import readahead
from shardconv.system.pagecache import drop, is_cached

NBYTES = 20_000_000


def fake_set(folder: Path, size: int) -> dict[str, Path]:
    """Files of a set by their names; prefetching checks nothing else."""
    folder.mkdir(parents=True)
    names = [f"rank-{rank:05d}-of-{size:05d}.safetensors" for rank in range(size)] + ["replicated.safetensors"]
    (folder / "shardconv.json").write_text("{}")
    files = {name: folder / name for name in names}
    for path in files.values():
        path.write_bytes(os.urandom(NBYTES))
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            drop(file.fileno(), 0, 0)
    return files


@pytest.mark.parametrize("where", ["set", "component", "pipeline"])
def test_a_rank_reads_its_own_file_and_the_shared_one(tmp_path: Path, where: str) -> None:
    """Given a set, a component or a pipeline folder, nothing but this rank's files comes into memory."""
    files = fake_set(tmp_path / "transformer" / "tp2", 2)
    assert not any(map(is_cached, files.values()))
    given = {"set": tmp_path / "transformer" / "tp2", "component": tmp_path / "transformer", "pipeline": tmp_path}
    loader.prefetch(given[where], rank=1, size=2).join(60)
    assert {name for name, path in files.items() if is_cached(path)} == {
        "rank-00001-of-00002.safetensors",
        "replicated.safetensors",
    }


@pytest.mark.slow
@pytest.mark.parametrize("where", ["set", "component"])
def test_files_that_a_rank_joins_are_read(tmp_path: Path, where: str) -> None:
    """Of a set of a multiple of the group's degree, the smallest, a rank's share of the files comes into memory."""
    files = fake_set(tmp_path / "tp4", 4)
    for degree in (1, 3, 8):
        (tmp_path / f"tp{degree}").mkdir()
        (tmp_path / f"tp{degree}" / "shardconv.json").write_text("{}")
    loader.prefetch(tmp_path / "tp4" if where == "set" else tmp_path, rank=1, size=2).join(60)
    names = {"rank-00002-of-00004.safetensors", "rank-00003-of-00004.safetensors", "replicated.safetensors"}
    assert {name for name, path in files.items() if is_cached(path)} == names


@pytest.mark.slow
def test_ranks_of_a_node_share_the_replicated_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of four local ranks reads a quarter of it, and together they read all of it."""
    shared = fake_set(tmp_path / "tp4", 4)["replicated.safetensors"]
    read: list[tuple[int, int]] = []
    sendfile = os.sendfile

    def spy(nowhere: int, fd: int, offset: int, count: int) -> int:
        sent = sendfile(nowhere, fd, offset, count)
        if os.path.samestat(os.fstat(fd), shared.stat()):
            read.append((offset, offset + sent))
        return sent

    monkeypatch.setattr(os, "sendfile", spy)
    monkeypatch.setattr(readahead, "CHUNK_NBYTES", NBYTES // 16)  # several to a share
    for rank in range(4):
        for key, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 4), ("LOCAL_WORLD_SIZE", 4)):
            monkeypatch.setenv(key, str(value))
        read.clear()
        loader.prefetch(tmp_path).join(60)
        assert sorted(read)[0][0] == NBYTES * rank // 4
        assert sorted(read)[-1][1] == NBYTES * (rank + 1) // 4
        assert sum(end - start for start, end in read) == NBYTES // 4


def test_it_stays_a_function() -> None:
    """`loader.prefetch(...)` works whatever has been imported, also the module of that name."""
    for name in ("loader.load", "loader.prefetch"):
        importlib.import_module(name)
        assert callable(loader.prefetch)
        loader.prefetch("nowhere").join(10)


WRONG_FOLDERS: dict[str, Callable[[Path], object]] = {
    "nowhere": lambda path: None,
    "a file": lambda path: path.write_bytes(b"x"),
    "an empty folder": lambda path: path.mkdir(),
    "a dangling link": lambda path: path.symlink_to("gone"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a set of folders": lambda path: (path / "tp1" / "replicated.safetensors").mkdir(parents=True),
    "a manifest that is a link to itself": lambda path: (
        (path / "tp1").mkdir(parents=True), (path / "tp1" / "shardconv.json").symlink_to("shardconv.json")
    ),
    "strange degrees": lambda path: [(path / name).mkdir(parents=True) for name in ("tp", "tpx", "tp0", "tp-1")],
}  # fmt: skip


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What threads end with."""
    found: list[object] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    return found


@pytest.mark.parametrize("make", WRONG_FOLDERS.values(), ids=WRONG_FOLDERS)
def test_a_wrong_folder_is_left_to_loading(tmp_path: Path, make: Callable[[Path], object], trouble: list) -> None:
    """Whatever stands there, nothing is raised, here or in the thread: `load_model` says what is wrong with it."""
    make(tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "out" / "tp1"):
        loader.prefetch(path).join(60)
        loader.prefetch(path, subfolder="transformer").join(60)
    assert trouble == []


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", " ", "0", "1", "-1", "2", "9999", "x", "1.5", "٣", "\u00b2", "9" * 5000])
def test_a_wrong_environment_is_left_to_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, trouble: list
) -> None:
    """An empty variable counts as none, another that makes no sense as one that loading refuses; nothing is raised."""
    small_set(tmp_path)
    for key, given in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(key, given)
    monkeypatch.setenv(name, value)
    loader.prefetch(tmp_path).join(60)
    assert trouble == []


@pytest.mark.parametrize(
    "options",
    [{"rank": -1}, {"rank": 2}, {"size": 0}, {"size": -1}, {"rank": "one"}, {"size": "two"}, {"subfolder": "\0"},
     {"path": "\0"}, {"path": "x" * 300}, {"path": None}, {"path": b"bytes"}],
    ids=lambda options: str(options)[:20],
)  # fmt: skip
def test_wrong_arguments_are_left_to_loading(tmp_path: Path, options: dict[str, Any], trouble: list) -> None:
    """A rank out of its group, a size of nothing, a name that no file can have: nothing is raised."""
    small_set(tmp_path)
    loader.prefetch(**({"path": tmp_path, "rank": 0, "size": 2} | options)).join(60)
    assert trouble == []


def small_set(folder: Path) -> dict[str, Path]:
    """A set for 2 ranks, of a byte each."""
    (folder / "tp2").mkdir()
    (folder / "tp2" / "shardconv.json").write_text("{}")
    names = ["rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors", "replicated.safetensors"]
    for name in names:
        (folder / "tp2" / name).write_bytes(b"x")
    return {name: folder / "tp2" / name for name in names}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the files that are read."""
    found: set[str] = set()
    sendfile = os.sendfile

    def spy(nowhere: int, fd: int, offset: int, count: int) -> int:
        found.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        return sendfile(nowhere, fd, offset, count)

    monkeypatch.setattr(os, "sendfile", spy)
    return found


def gone(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "harm", [gone, pipe, lambda path: (path.unlink(), path.mkdir())], ids=["link", "pipe", "folder"]
)
def test_one_file_that_cannot_be_read_does_not_stop_the_others(
    tmp_path: Path, harm: Callable[[Path], object], read: set[str]
) -> None:
    """A rank file that is a dangling link, a pipe or a folder is passed over; the shared file is read."""
    harm(small_set(tmp_path)["rank-00000-of-00002.safetensors"])
    loader.prefetch(tmp_path, rank=0, size=2).join(10)
    assert read == {"replicated.safetensors"}


def test_reading_ahead_ends_when_the_load_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a load began to read in the background is not read to the end once the load has failed."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(100))
    monkeypatch.setattr(readahead, "CHUNK_NBYTES", 1)
    asked: list[int] = []
    readahead.read_ahead([path], lambda: asked.append(1) or len(asked) > 5).join(60)
    assert len(asked) == 6


@pytest.mark.slow
def test_it_needs_the_standard_library_only(tmp_path: Path) -> None:
    """Neither torch nor numpy nor anything else from site-packages is imported, so that it can be the first line."""
    code = """
        import sys
        import loader
        loader.prefetch(sys.argv[1]).join()
        foreign = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
        print(sorted(name for name in foreign if not name.startswith("_")))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "loader" in done.stdout
    assert not {"torch", "numpy", "diffusers", "shardconv", "xxhash"} & set(eval(done.stdout))


@pytest.mark.slow
def test_a_script_runs_as_if_started_itself(tmp_path: Path) -> None:
    """`python -m loader.prefetch PATH -- SCRIPT ARGS`: name, arguments and import path are the script's own."""
    script = tmp_path / "scripts" / "serve.py"
    script.parent.mkdir()
    (script.parent / "beside.py").write_text("VALUE = 7\n")
    script.write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.VALUE)\n")
    command = [sys.executable, "-m", "loader.prefetch", str(tmp_path), "--", str(script), "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "__main__ ['--steps', '4'] 7\n"
    assert done.stderr == ""


@pytest.mark.slow
def test_the_script_runs_whatever_cannot_be_prefetched(tmp_path: Path) -> None:
    """A folder that is not there and an environment that makes no sense do not keep the script from its own words."""
    (tmp_path / "serve.py").write_text("print('served')\n")
    command = [sys.executable, "-m", "loader.prefetch", str(tmp_path / "nowhere"), "--", str(tmp_path / "serve.py")]
    env = {**os.environ, "RANK": "", "WORLD_SIZE": "none", "LOCAL_WORLD_SIZE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "served\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("argv", [[], ["out"], ["out", "serve.py"]])
def test_a_wrong_command_line_shows_the_right_one(argv: list[str]) -> None:
    """Without `--` and a script the usage and an example are printed."""
    done = subprocess.run([sys.executable, "-m", "loader.prefetch", *argv], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "usage: python -m loader.prefetch PATH -- SCRIPT" in done.stderr
