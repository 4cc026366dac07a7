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
from collections.abc import Iterable
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
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    size = int(os.environ.get("WORLD_SIZE", "1")) if size is None else size
    return read_ahead(
        file for folder in _sets(Path(path) / (subfolder or ""), size) for file in _own(folder, rank, size)
    )


def read_ahead(files: Iterable[Path]) -> threading.Thread:
    """Begin reading `files`, of `replicated.safetensors` this rank's share among those of its node; see `prefetch`."""
    spans = [(path, *_share(path)) for path in files]
    thread = threading.Thread(target=_read_spans, args=(spans,), name="loader-prefetch", daemon=True)
    thread.start()
    return thread


def _share(path: Path) -> tuple[int, int]:
    """(start, exclusive end) in bytes of what this rank reads of a file."""
    nbytes = path.stat().st_size
    if path.name != "replicated.safetensors":
        return 0, nbytes
    local, nr_local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return nbytes * local // nr_local, nbytes * (local + 1) // nr_local


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


def _read_spans(spans: list[tuple[Path, int, int]]) -> None:
    """Have the system read, and throw away: nothing is copied, and the interpreter lock is free meanwhile."""
    with contextlib.suppress(OSError), open(os.devnull, "wb", buffering=0) as nowhere:  # loading meets the same fault
        for path, start, end in spans:
            with open(path, "rb", buffering=0) as file:
                while start < end:
                    sent = os.sendfile(nowhere.fileno(), file.fileno(), start, min(CHUNK_NBYTES, end - start))
                    if sent == 0:  # the file is shorter now
                        break
                    start += sent
