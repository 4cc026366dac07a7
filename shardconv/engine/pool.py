"""A few threads that read, each with a chunk of memory, and what they append to."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import xxhash

from ..errors import CheckpointError
from ..system.cores import usable_cores
from ..system.pagecache import start_writeback
from ..system.progress import Progress
from .records import Extent

CHUNK_NBYTES = 8 << 20  # bytes read at once by a worker
WRITE_NBYTES = 1 << 20  # bytes written at once; larger writes stalled in the kernel (benchmarks/README.md, log)
WORKERS = 4  # threads at most, never more than there are cores
READERS = 16  # the same of threads that only read; more would take more memory than files
_Item = TypeVar("_Item")
Result = TypeVar("Result")


@dataclass(slots=True)
class SliceWriter:
    """What one rank (or, for a whole tensor, every file that takes it) receives, appended to."""

    places: list[tuple[int, int]]  # (file descriptor, absolute byte offset) of the next byte
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    def append(self, data: memoryview) -> None:
        self.digest.update(data)
        for i, (fd, offset) in enumerate(self.places):
            write_all(fd, data, offset)
            start_writeback(fd, offset, data.nbytes)
            self.places[i] = fd, offset + data.nbytes


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """`pwrite` until every byte of `data` is written. Raises `OSError` as the system does."""
    while data.nbytes:
        written = os.pwrite(fd, data[:WRITE_NBYTES], offset)
        data, offset = data[written:], offset + written


class Reader:
    """Sequential reads of one extent into a reused buffer, digested on the way."""

    def __init__(self, workers: Workers, extent: Extent, buffer: memoryview) -> None:
        self._workers, self._extent, self._buffer = workers, extent, buffer
        self._fd = workers.fds[extent.path]
        self._offset = extent.offset
        self.digest = xxhash.xxh3_128()

    def take(self, nbytes: int) -> memoryview:
        """The next `nbytes` (at most the buffer); valid until the next call."""
        if self._workers.stop.is_set():
            raise _Stopped
        view = self._buffer[:nbytes]
        position = 0
        while position < nbytes:
            try:
                num_read = os.preadv(self._fd, [view[position:]], self._offset + position)
            except OSError as error:
                raise _unreadable(self._extent.path, error) from error
            if num_read == 0:
                name = self._extent.path.name
                raise CheckpointError(f"{name}: the file became shorter while it was read; leave it alone and rerun")
            position += num_read
        self._offset += nbytes
        self.digest.update(view)
        self._workers.progress(nbytes)
        return view


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error.strerror}); look at its disk, or fetch the file again")


class _Stopped(Exception):
    """Another worker failed; its error is the one to report."""


class Workers:
    """A few threads, each dealing with one tensor at a time, and the files they read."""

    def __init__(self, paths: set[Path], progress: Progress, most: int | None = None) -> None:
        self.num_threads = min(most or WORKERS, usable_cores())
        self.progress = progress
        self.stop = threading.Event()
        self.fds: dict[Path, int] = {}
        self._paths = paths
        self._local = threading.local()

    def buffer(self) -> memoryview:
        """This thread's chunk of memory."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(CHUNK_NBYTES))
        buffer: memoryview = self._local.buffer
        return buffer

    def each(self, items: Iterable[_Item], work: Callable[[_Item], Result]) -> list[Result]:
        """`work` of every item, in order; the first error ends all of them."""
        with ExitStack() as stack:
            for path in self._paths:
                try:
                    self.fds[path] = os.open(path, os.O_RDONLY)
                except OSError as refused:
                    raise _unreadable(path, refused) from refused
                stack.callback(os.close, self.fds[path])
            executor = stack.enter_context(ThreadPoolExecutor(self.num_threads, "shardconv"))

            def stopping(item: _Item) -> Result:
                try:
                    return work(item)
                except BaseException:
                    self.stop.set()
                    raise

            try:
                futures = [executor.submit(stopping, item) for item in items]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self.stop.set()  # does nothing to work that is done; ends what goes on after an error or Ctrl-C
                executor.shutdown(cancel_futures=True)
            for future in futures:
                error = None if future.cancelled() else future.exception()
                if error is not None and not isinstance(error, _Stopped):
                    raise error
            return [future.result() for future in futures]


def chunks(nbytes: int) -> Iterator[int]:
    """`nbytes` in pieces of at most a chunk."""
    while nbytes:
        yield min(nbytes, CHUNK_NBYTES)
        nbytes -= min(nbytes, CHUNK_NBYTES)
