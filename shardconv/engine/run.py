"""Moves bytes: reads each tensor once, in order, from one file or from the slices of some ranks, and appends every
rank's share to its file.

Knows nothing of models. Each worker thread takes one tensor at a time and holds at most three chunks of memory.
Reading, hashing, gathering and writing all release the interpreter lock, so two workers keep two cores busy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from ..errors import CheckpointError
from ..format.cut import Rows, runs
from ..format.dtypes import DTYPE_BITS, nbytes_of
from ..format.layout import ConvertPlan, StoredTensor
from ..system.cores import usable_cores
from ..system.pagecache import drop, start_writeback

CHUNK_NBYTES = 8 << 20  # bytes read at once by a worker
WRITE_NBYTES = 1 << 20  # bytes written at once; larger writes stalled in the kernel (benchmarks/README.md, log)
WORKERS = 4  # threads at most, never more than there are cores
READERS = 16  # the same of threads that only read; more would take more memory than files

Progress = Callable[[int], None]  # called with a number of source bytes just dealt with
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class TensorDigests:
    """xxh3-128, hex."""

    source: str  # of the source bytes
    slices: tuple[str, ...]  # of the stored bytes, one a rank; a single one when whole


_NOTHING: Mapping[str, TensorDigests] = {}


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of one tensor, or of one rank's slice of it, in a file."""

    path: Path
    offset: int  # absolute, bytes
    nbytes: int


@dataclass(slots=True)
class _Slice:
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


class _Reader:
    """Sequential reads of one extent into a reused buffer, digested on the way."""

    def __init__(self, workers: _Workers, extent: Extent, buffer: memoryview) -> None:
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
                nr_read = os.preadv(self._fd, [view[position:]], self._offset + position)
            except OSError as error:
                raise _unreadable(self._extent.path, error) from error
            if nr_read == 0:
                name = self._extent.path.name
                raise CheckpointError(f"{name}: the file became shorter while it was read; leave it alone and rerun")
            position += nr_read
        self._offset += nbytes
        self.digest.update(view)
        self._workers.progress(nbytes)
        return view


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error.strerror}); look at its disk, or fetch the file again")


class _Stopped(Exception):
    """Another worker failed; its error is the one to report."""


class _Workers:
    """A few threads, each dealing with one tensor at a time, and the files they read."""

    def __init__(self, paths: set[Path], progress: Progress, most: int | None = None) -> None:
        self.nr = min(most or WORKERS, usable_cores())
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

    def each(self, items: Iterable[_Item], work: Callable[[_Item], _Result]) -> list[_Result]:
        """`work` of every item, in order; the first error ends all of them."""
        with ExitStack() as stack:
            for path in self._paths:
                try:
                    self.fds[path] = os.open(path, os.O_RDONLY)
                except OSError as refused:
                    raise _unreadable(path, refused) from refused
                stack.callback(os.close, self.fds[path])
            executor = stack.enter_context(ThreadPoolExecutor(self.nr, "shardconv"))

            def stopping(item: _Item) -> _Result:
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


def run(
    plan: ConvertPlan,
    outputs: Sequence[int] | None,
    progress: Progress,
    cold: Collection[Path] = (),
    done: Mapping[str, TensorDigests] = _NOTHING,
    add: Callable[[str, TensorDigests], None] = lambda name, digests: None,
) -> Mapping[str, TensorDigests]:
    """Carry out `plan`. `outputs` are writable file descriptors, one for each file of the layout; None writes nothing
    and only takes the digests. `cold` are source files that need not stay in memory once they are used. Tensors in
    `done` are left as they are; `add` is called, by the worker, with each other one as soon as it is written.

    Returns the digests by tensor name. Memory: WORKERS times two chunks. Raises `CheckpointError` when a source file
    changes under the reader or cannot be read, `OSError` when the system refuses a write; nothing is retried.
    """
    extents = _extents(plan)
    workers = _Workers({extent.path for extent in extents.values()}, progress)

    def work(tensor: StoredTensor) -> TensorDigests:
        slices = _slices(tensor, plan.layout.starts[tensor.name], outputs)
        reader = _Reader(workers, extents[tensor.name], workers.buffer())
        _route(tensor, plan.sources[tensor.name].entry.dtype, [reader], slices)
        if extents[tensor.name].path in cold:
            drop(workers.fds[extents[tensor.name].path], extents[tensor.name].offset, extents[tensor.name].nbytes)
        digests = TensorDigests(reader.digest.hexdigest(), tuple(each.digest.hexdigest() for each in slices))
        add(tensor.name, digests)
        return digests

    left = [tensor for tensor in plan.layout.tensors if tensor.name not in done]
    return {**done, **_by_name(left, workers.each(left, work))}


def _slices(tensor: StoredTensor, starts: Sequence[tuple[int, int]], outputs: Sequence[int] | None) -> list[_Slice]:
    """Of a cut tensor one a rank; of a whole one a single one, for all its copies."""
    places = [[] if outputs is None else [(outputs[index], offset)] for index, offset in starts]
    return [_Slice(place) for place in places] if tensor.cut else [_Slice([each for place in places for each in place])]


def _by_name(tensors: Sequence[StoredTensor], results: Sequence[_Result]) -> dict[str, _Result]:
    return {tensor.name: result for tensor, result in zip(tensors, results, strict=True)}


def digest_sources(plan: ConvertPlan, progress: Progress) -> Mapping[str, str]:
    """xxh3-128 of every source tensor of `plan`, by name; reads everything, writes nothing."""
    extents = _extents(plan)
    workers = _Workers({extent.path for extent in extents.values()}, progress)

    found = workers.each(plan.layout.tensors, lambda tensor: _digest(workers, extents[tensor.name]))
    return _by_name(plan.layout.tensors, found)


def digests(extents: Sequence[Extent], progress: Progress) -> list[str | OSError | CheckpointError]:
    """xxh3-128 of each extent, in order; in place of one that cannot be read, the error that says why.

    Memory: READERS times one chunk.
    """
    workers = _Workers({extent.path for extent in extents}, progress, READERS)

    def work(extent: Extent) -> str | OSError | CheckpointError:
        try:
            return _digest(workers, extent)
        except CheckpointError as error:
            return error.__cause__ if isinstance(error.__cause__, OSError) else error

    return workers.each(extents, work)


def _digest(workers: _Workers, extent: Extent) -> str:
    reader = _Reader(workers, extent, workers.buffer())
    for nbytes in _chunks(extent.nbytes):
        reader.take(nbytes)
    return reader.digest.hexdigest()


def _extents(plan: ConvertPlan) -> dict[str, Extent]:
    return {name: Extent(source.file.path, source.offset, source.entry.nbytes) for name, source in plan.sources.items()}


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """From slices of one degree to those of another (1: whole tensors): where every slice stands, and where it goes."""

    tensors: Sequence[StoredTensor]
    slices: Mapping[str, Sequence[Extent]]  # one a source rank; a single one when whole
    starts: Mapping[str, Sequence[tuple[int, int]]]  # (index into outputs, absolute byte offset), as in `SetLayout`

    @property
    def read_nbytes(self) -> int:
        """Bytes of tensor data read."""
        return sum(extent.nbytes for extents in self.slices.values() for extent in extents)


@dataclass(frozen=True, slots=True)
class RouteDigests:
    """xxh3-128, hex, of one tensor's slices as they were read and as they were written."""

    read: tuple[str, ...]
    written: tuple[str, ...]


def reroute(plan: RoutePlan, outputs: Sequence[int], progress: Progress) -> Mapping[str, RouteDigests]:
    """Carry out `plan`; the digests by tensor name. Memory: WORKERS times three chunks. Raises as `run` does."""
    workers = _Workers({extent.path for extents in plan.slices.values() for extent in extents}, progress)

    def work(tensor: StoredTensor) -> RouteDigests:
        slices = _slices(tensor, plan.starts[tensor.name], outputs)
        readers = [_Reader(workers, extent, workers.buffer()) for extent in plan.slices[tensor.name]]
        _route(tensor, tensor.dtype, readers, slices)
        return RouteDigests(
            tuple(reader.digest.hexdigest() for reader in readers), tuple(each.digest.hexdigest() for each in slices)
        )

    return _by_name(plan.tensors, workers.each(plan.tensors, work))


def _route(tensor: StoredTensor, stored_as: str, readers: Sequence[_Reader], slices: Sequence[_Slice]) -> None:
    """Send every byte of one tensor, `stored_as` that dtype where it is read, to the slices it belongs to."""
    rows = tensor.rows()
    if rows is None:
        for nbytes in _chunks(nbytes_of(stored_as, tensor.shape)):
            slices[0].append(_cast(readers[0].take(nbytes), stored_as, tensor.dtype))
        return
    itemsize = DTYPE_BITS[stored_as] // 8
    if rows.nr_rows * rows.row_length == 0:
        return
    if rows.nr_rows == 1 or rows.row_length * itemsize > CHUNK_NBYTES:
        for _ in range(rows.nr_rows):
            for source, target, length in runs(rows, len(readers), len(slices)):
                for nbytes in _chunks(length * itemsize):
                    slices[target].append(_cast(readers[source].take(nbytes), stored_as, tensor.dtype))
        return
    per_chunk = CHUNK_NBYTES // (rows.row_length * itemsize)
    for first in range(0, rows.nr_rows, per_chunk):
        nr_rows = min(per_chunk, rows.nr_rows - first)
        data = _cast(_assemble(readers, nr_rows, rows, itemsize), stored_as, tensor.dtype)
        for rank, share in enumerate(_gather(data, nr_rows, rows, DTYPE_BITS[tensor.dtype] // 8, len(slices))):
            slices[rank].append(share)


def _chunks(nbytes: int) -> Iterator[int]:
    """`nbytes` in pieces of at most a chunk."""
    while nbytes:
        yield min(nbytes, CHUNK_NBYTES)
        nbytes -= min(nbytes, CHUNK_NBYTES)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The same bytes of a row, in the whole tensor and in one rank's slice."""

    whole: slice
    local: slice


def _columns(rows: Rows, rank: int, itemsize: int, tp: int) -> Iterator[_Columns]:
    """For each block, the bytes of a row that `rank` holds."""
    whole = local = 0
    for block in rows.blocks:
        part = block * itemsize // tp
        start = whole + rank * part
        yield _Columns(slice(start, start + part), slice(local, local + part))
        whole, local = whole + block * itemsize, local + part


def _assemble(readers: Sequence[_Reader], nr_rows: int, rows: Rows, itemsize: int) -> memoryview:
    """The next `nr_rows` whole rows, from the columns that each reader has of them."""
    row_nbytes = rows.row_length * itemsize
    if len(readers) == 1:
        return readers[0].take(nr_rows * row_nbytes)
    table = np.empty((nr_rows, row_nbytes), np.uint8)
    for rank, reader in enumerate(readers):
        data = reader.take(nr_rows * row_nbytes // len(readers))
        part = np.frombuffer(data, np.uint8).reshape(nr_rows, row_nbytes // len(readers))
        for place in _columns(rows, rank, itemsize, len(readers)):
            table[:, place.whole] = part[:, place.local]
    return table.data.cast("B")


def _gather(data: memoryview, nr_rows: int, rows: Rows, itemsize: int, tp: int) -> Iterator[memoryview]:
    """Each rank's columns of `nr_rows` whole rows, contiguous."""
    if tp == 1:
        yield data
        return
    table = np.frombuffer(data, np.uint8).reshape(nr_rows, rows.row_length * itemsize)
    for rank in range(tp):
        share = np.empty((nr_rows, rows.row_length * itemsize // tp), np.uint8)
        for place in _columns(rows, rank, itemsize, tp):
            share[:, place.local] = table[:, place.whole]
        yield share.data.cast("B")


def _cast(data: memoryview, source: str, target: str) -> memoryview:
    """`data` as elements of `target`; the same bytes when nothing changes. Rounds to nearest even, as torch does."""
    if source == target or not data.nbytes:
        return data
    import torch

    from ..format.dtypes import torch_dtype

    tensor = torch.frombuffer(data, dtype=torch_dtype(source)).to(torch_dtype(target))
    return tensor.view(torch.uint8).numpy().data
