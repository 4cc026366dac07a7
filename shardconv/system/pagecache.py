"""What the operating system keeps of files in memory: asked, and hinted at. Hints never fail; they only cost speed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MAP_FAILED = ctypes.c_void_p(-1).value
_READ_NBYTES = 8 << 20  # bytes read at once
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: start writing these dirty pages, do not wait


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Have the disk begin with freshly written bytes now, so that a later fsync finds little left to do."""
    call = getattr(_libc, "sync_file_range", None)
    if call is not None:
        call(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def drop(fd: int, offset: int, nbytes: int) -> None:
    """Give the pages of bytes that will not be needed again back to the system."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


class ReadAhead:
    """Reads the first bytes of files into memory, in a thread, until left. A context manager."""

    def __init__(self, paths: Iterable[Path], limit: int) -> None:
        """`limit`: how many bytes to read at most, of all files together."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(list(paths), limit), name="shardconv-read-ahead")

    def _run(self, paths: Sequence[Path], left: int) -> None:
        buffer = bytearray(_READ_NBYTES)
        with contextlib.suppress(OSError):  # whoever reads for real meets the same fault and says so
            for path in paths:
                with open(path, "rb", buffering=0) as file:
                    while left > 0 and not self._stop.is_set() and (got := file.readinto(buffer)):
                        left -= got

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()


def is_cached(path: Path) -> bool:
    """Whether most of a file is in memory (mincore on up to 64 pages spread over it)."""
    try:
        nbytes = path.stat().st_size
        return nbytes == 0 or _most_pages_resident(path, nbytes)
    except OSError:
        return True  # cannot tell: read through the cache, as any program would


def _most_pages_resident(path: Path, nbytes: int) -> bool:
    with open(path, "rb") as file:
        # Read-only, which Python's mmap would be too but keeps its address to itself: one that may be written is
        # refused where the system counts it as memory.
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
    if address == _MAP_FAILED:
        return True
    try:
        pages = -(-nbytes // mmap.PAGESIZE)
        spots = range(0, pages, max(1, pages // 64))
        state = (ctypes.c_ubyte * 1)()
        resident = 0
        for spot in spots:
            if _libc.mincore(ctypes.c_void_p(address + spot * mmap.PAGESIZE), ctypes.c_size_t(1), state) != 0:
                return True
            resident += state[0] & 1
    finally:
        _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    return resident * 2 > len(spots)
