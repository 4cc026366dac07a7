"""`loader.prefetch`: this rank's files come into the page cache while Python is still importing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import loader
from loader import readahead
from shardconv.pagecache import drop, is_cached

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


@pytest.mark.parametrize("path", ["nowhere", "a-file"])
def test_what_is_not_there_is_left_to_loading(tmp_path: Path, path: str) -> None:
    """A wrong path raises nothing here: `load_model` says what is wrong with it."""
    (tmp_path / "a-file").write_bytes(b"x")
    loader.prefetch(tmp_path / path).join(60)


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
@pytest.mark.parametrize("argv", [[], ["out"], ["out", "serve.py"]])
def test_a_wrong_command_line_shows_the_right_one(argv: list[str]) -> None:
    """Without `--` and a script the usage and an example are printed."""
    done = subprocess.run([sys.executable, "-m", "loader.prefetch", *argv], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "usage: python -m loader.prefetch PATH -- SCRIPT" in done.stderr
