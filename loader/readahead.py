"""Warm the page cache with this rank's files while Python is still importing torch. Standard library only.

    import loader; loader.prefetch("out")                       # first line of a serving script; returns at once
    torchrun --nproc-per-node 4 -m loader.prefetch out -- serve.py

Nothing is checked here: a file that is missing or damaged is `load_model`'s to report.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

CHUNK_NBYTES = 8 << 20  # bytes read at once, and the memory of one thread
THREADS = 2  # enough to keep a disk busy; more only take turns with the imports


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
    files = []
    for folder in _sets(Path(path) / (subfolder or ""), size):
        names = (f"rank-{rank:05d}-of-{size:05d}.safetensors", "replicated.safetensors")
        files += [folder / name for name in names if (folder / name).is_file()]
    return read_ahead(files)


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
    """`folder` itself, its `tpN`, or the `tpN` of each of its components; whichever there is."""
    if (folder / "shardconv.json").is_file():
        return [folder]
    inside = folder / f"tp{size}"
    if inside.is_dir():
        return [inside]
    return sorted(path for path in folder.glob(f"*/tp{size}") if path.is_dir())


def _read_spans(spans: list[tuple[Path, int, int]]) -> None:
    pieces = [
        (path, offset, min(offset + CHUNK_NBYTES, end))
        for path, start, end in spans
        for offset in range(start, end, CHUNK_NBYTES)
    ]
    todo, lock = iter(pieces), threading.Lock()

    def read_some() -> None:
        buffer = memoryview(bytearray(CHUNK_NBYTES))
        files: dict[Path, int] = {}
        try:
            while True:
                with lock:
                    piece = next(todo, None)
                if piece is None:
                    return
                path, start, end = piece
                if path not in files:
                    files[path] = os.open(path, os.O_RDONLY)
                os.preadv(files[path], [buffer[: end - start]], start)
        except OSError:
            return  # loading meets the same fault and says so
        finally:
            for fd in files.values():
                os.close(fd)

    threads = [threading.Thread(target=read_some, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
