"""Warm the page cache with this rank's files while Python is still importing torch. Standard library only.

    import loader; loader.prefetch("out")                       # first line of a serving script; returns at once
    torchrun --nproc-per-node 4 -m loader.prefetch out -- serve.py

Nothing is checked here: a file that is missing or damaged is `load_model`'s to report.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

CHUNK_NBYTES = 8 << 20  # bytes asked for at once


def prefetch(
    path: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> threading.Thread:
    """Begin reading what this rank will load from `path`: an output folder, a component folder or one set (`tp4`).

    `rank` and `size` are those of the group that shares the model; None takes torchrun's RANK and WORLD_SIZE. Ranks of
    one node read their part of the replicated file each. Returns at once, with the thread that ends when all is read.
    Raises nothing: what is wrong, with the folder or with the environment, loading meets as well, and tells.
    """
    rank = _number("RANK", 0) if rank is None else rank
    size = _number("WORLD_SIZE", 1) if size is None else size
    return read_ahead(_files(path, subfolder, rank, size))


def read_ahead(files: Iterable[Path], given_up: Callable[[], bool] = lambda: False) -> threading.Thread:
    """Begin reading `files`, of `replicated.safetensors` this rank's share among those of its node, until all is read
    or `given_up()`; see `prefetch`."""
    local, num_local = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)

    def read() -> None:
        with contextlib.suppress(Exception):  # of whatever kind: nothing here is for us to report
            for path in files:
                shared = path.name == "replicated.safetensors" and 0 <= local < num_local
                _read(path, local if shared else 0, num_local if shared else 1, given_up)

    thread = threading.Thread(target=read, name="loader-prefetch", daemon=True)
    thread.start()
    return thread


def _number(name: str, default: int) -> int:
    """What the environment says; -1, which is no rank and no number of ranks, when that is no number."""
    told = os.environ.get(name, "").strip()
    return default if not told else int(told) if re.fullmatch(r"\d{1,9}", told, re.ASCII) else -1


def _files(path: str | os.PathLike[str], subfolder: str | None, rank: int, size: int) -> Iterator[Path]:
    if 0 <= rank < size:
        for folder in _sets(Path(path) / (subfolder or ""), size):
            yield from _own(folder, rank, size)


def _sets(folder: Path, size: int) -> list[Path]:
    """`folder` itself, its fitting `tpN`, or that of each of its components; whichever there is."""
    if (folder / "shardconv.json").is_file():
        return [folder]
    return _fitting(folder, size) or [found for inner in sorted(folder.glob("*/")) for found in _fitting(inner, size)]


def _fitting(component: Path, size: int) -> list[Path]:
    """The set that `load_model` takes: of the smallest tp degree that is a multiple of `size`; none or one."""
    found = {int(path.parent.name[2:]): path.parent for path in component.glob("tp[1-9]*/shardconv.json")
             if path.parent.name[2:].isdecimal()}  # fmt: skip
    degrees = [degree for degree in found if degree % size == 0]
    return [found[min(degrees)]] if degrees else []


def _own(folder: Path, rank: int, size: int) -> list[Path]:
    """The files of a set that `rank` of `size` takes: by their names its share of the rank files; the shared one."""
    files = []
    for path in sorted(folder.glob("*.safetensors")):
        named = re.fullmatch(r"rank-(\d+)-of-(0*[1-9]\d*)", path.stem)
        if path.name == "replicated.safetensors" or (named and int(named[1]) * size // int(named[2]) == rank):
            files.append(path)
    return files


def _read(path: Path, part: int, parts: int, given_up: Callable[[], bool]) -> None:
    """Have the system read one of so many equal parts, and throw it away: nothing is copied, and the interpreter lock
    is free meanwhile. A file that cannot be read is passed over."""
    with contextlib.suppress(OSError), open(os.devnull, "wb", buffering=0) as nowhere:
        if not path.is_file():  # a pipe would never end
            return
        with open(path, "rb", buffering=0) as file:
            nbytes = os.fstat(file.fileno()).st_size
            start, end = nbytes * part // parts, nbytes * (part + 1) // parts
            while start < end and not given_up():
                sent = os.sendfile(nowhere.fileno(), file.fileno(), start, min(CHUNK_NBYTES, end - start))
                if sent == 0:  # the file is shorter now
                    break
                start += sent
