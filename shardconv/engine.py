"""Moves bytes: reads each source tensor once, in order, and appends every rank's share to its file; or the other way.

Knows nothing of models. Each worker thread takes one tensor at a time and holds at most two chunks of memory; reading,
hashing, gathering and writing all release the interpreter lock, so two workers keep two cores busy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from .cut import Rows, runs
from .errors import CheckpointError
from .header import DTYPE_BITS, nbytes_of
from .layout import ConvertPlan, StoredTensor
from .pagecache import drop, start_writeback

CHUNK_NBYTES = 8 << 20  # bytes read at once by a worker
WRITE_NBYTES = 1 << 20  # bytes written at once; larger writes stalled in the kernel (benchmarks/README.md, log)
WORKERS = max(2, min(4, os.cpu_count() or 1))

Progress = Callable[[int], None]  # called with a number of source bytes just dealt with
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
            nr_read = os.preadv(self._fd, [view[position:]], self._offset + position)
            if nr_read == 0:
                name = self._extent.path.name
                raise CheckpointError(f"{name}: the file became shorter while it was read; leave it alone and rerun")
            position += nr_read
        self._offset += nbytes
        self.digest.update(view)
        self._workers.progress(nbytes)
        return view


class _Stopped(Exception):
    """Another worker failed; its error is the one to report."""


class _Workers:
    """A few threads, each dealing with one tensor at a time, and the files they read."""

    def __init__(self, paths: set[Path], progress: Progress) -> None:
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

    def each(self, tensors: Sequence[StoredTensor], work: Callable[[StoredTensor], _Result]) -> dict[str, _Result]:
        """`work` of every tensor by name; the first error ends all of them."""
        with ExitStack() as stack:
            for path in self._paths:
                self.fds[path] = os.open(path, os.O_RDONLY)
                stack.callback(os.close, self.fds[path])
            executor = stack.enter_context(ThreadPoolExecutor(WORKERS, "shardconv"))

            def stopping(tensor: StoredTensor) -> _Result:
                try:
                    return work(tensor)
                except BaseException:
                    self.stop.set()
                    raise

            try:
                futures = {tensor.name: executor.submit(stopping, tensor) for tensor in tensors}
                wait(futures.values(), return_when=FIRST_EXCEPTION)
            finally:
                self.stop.set()  # does nothing to work that is done; ends what goes on after an error or Ctrl-C
                executor.shutdown(cancel_futures=True)
            for future in futures.values():
                error = None if future.cancelled() else future.exception()
                if error is not None and not isinstance(error, _Stopped):
                    raise error
            return {name: future.result() for name, future in futures.items()}


def run(
    plan: ConvertPlan,
    outputs: Sequence[int],
    progress: Progress,
    cold: Collection[Path] = (),
    done: Mapping[str, TensorDigests] = _NOTHING,
    add: Callable[[str, TensorDigests], None] = lambda name, digests: None,
) -> Mapping[str, TensorDigests]:
    """Carry out `plan`. `outputs` are writable file descriptors, one for each file of the layout; `cold` are source
    files that need not stay in memory once they are used. Tensors in `done` are left as they are; `add` is called, by
    the worker, with each other one as soon as it is written.

    Returns the digests by tensor name. Memory: WORKERS times two chunks. Raises `CheckpointError` when a source file
    changes under the reader, `OSError` when the system refuses a read or a write; nothing is retried.
    """
    extents = _extents(plan)
    workers = _Workers({extent.path for extent in extents.values()}, progress)

    def work(tensor: StoredTensor) -> TensorDigests:
        places = [(outputs[index], offset) for index, offset in plan.layout.starts[tensor.name]]
        slices = [_Slice([place]) for place in places] if tensor.cut else [_Slice(places)]
        reader = _Reader(workers, extents[tensor.name], workers.buffer())
        _split(tensor, plan.sources[tensor.name].entry.dtype, reader, slices, plan.layout.tp)
        if extents[tensor.name].path in cold:
            drop(workers.fds[extents[tensor.name].path], extents[tensor.name].offset, extents[tensor.name].nbytes)
        digests = TensorDigests(reader.digest.hexdigest(), tuple(each.digest.hexdigest() for each in slices))
        add(tensor.name, digests)
        return digests

    return {**done, **workers.each([tensor for tensor in plan.layout.tensors if tensor.name not in done], work)}


def digest_sources(plan: ConvertPlan, progress: Progress) -> Mapping[str, str]:
    """xxh3-128 of every source tensor of `plan`, by name; reads everything, writes nothing."""
    extents = _extents(plan)
    workers = _Workers({extent.path for extent in extents.values()}, progress)

    def work(tensor: StoredTensor) -> str:
        extent = extents[tensor.name]
        reader = _Reader(workers, extent, workers.buffer())
        for nbytes in _chunks(extent.nbytes):
            reader.take(nbytes)
        return reader.digest.hexdigest()

    return workers.each(plan.layout.tensors, work)


def _extents(plan: ConvertPlan) -> dict[str, Extent]:
    return {name: Extent(source.file.path, source.offset, source.entry.nbytes) for name, source in plan.sources.items()}


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """The way back: every tensor's slices, and where the whole tensor goes."""

    tensors: Sequence[StoredTensor]
    tp: int
    slices: Mapping[str, Sequence[Extent]]  # one a rank; a single one when whole
    starts: Mapping[str, tuple[int, int]]  # (index into the outputs, absolute byte offset) of the whole tensor


def join(plan: JoinPlan, outputs: Sequence[int], progress: Progress) -> Mapping[str, tuple[str, ...]]:
    """Put slices together into whole tensors; the digests of the slices as they were read, by tensor name.

    Raises as `run` does.
    """
    workers = _Workers({extent.path for extents in plan.slices.values() for extent in extents}, progress)

    def work(tensor: StoredTensor) -> tuple[str, ...]:
        extents = plan.slices[tensor.name]
        buffer, share = workers.buffer(), CHUNK_NBYTES // len(extents)
        readers = [_Reader(workers, extent, buffer[i * share : (i + 1) * share]) for i, extent in enumerate(extents)]
        index, offset = plan.starts[tensor.name]
        _join(tensor, readers, _Slice([(outputs[index], offset)]), plan.tp, share)
        return tuple(reader.digest.hexdigest() for reader in readers)

    return workers.each(plan.tensors, work)


def _join(tensor: StoredTensor, readers: Sequence[_Reader], whole: _Slice, tp: int, share: int) -> None:
    """Append every byte of one tensor to `whole`, taking at most `share` bytes of a slice at once."""
    rows = tensor.rows()
    if rows is None:
        for nbytes in _chunks(tensor.slice_nbytes(tp), share):
            whole.append(readers[0].take(nbytes))
        return
    itemsize = DTYPE_BITS[tensor.dtype] // 8
    row_nbytes = rows.row_length * itemsize // tp  # of one slice
    if rows.nr_rows * row_nbytes == 0:
        return
    if rows.nr_rows == 1 or row_nbytes > share:
        for _ in range(rows.nr_rows):
            for rank, length in runs(rows, tp):
                for nbytes in _chunks(length * itemsize, share):
                    whole.append(readers[rank].take(nbytes))
        return
    per_chunk = share // row_nbytes
    for first in range(0, rows.nr_rows, per_chunk):
        nr_rows = min(per_chunk, rows.nr_rows - first)
        table = np.empty((nr_rows, rows.row_length * itemsize), np.uint8)
        for rank, reader in enumerate(readers):
            part = np.frombuffer(reader.take(nr_rows * row_nbytes), np.uint8).reshape(nr_rows, row_nbytes)
            for place in _columns(rows, rank, itemsize, tp):
                table[:, place.whole] = part[:, place.local]
        whole.append(table.data.cast("B"))


def _split(tensor: StoredTensor, stored_as: str, reader: _Reader, slices: Sequence[_Slice], tp: int) -> None:
    """Send every byte of one tensor, `stored_as` that dtype in the source, to the slices it belongs to."""
    rows = tensor.rows()
    if rows is None:
        for nbytes in _chunks(nbytes_of(stored_as, tensor.shape)):
            slices[0].append(_cast(reader.take(nbytes), stored_as, tensor.dtype))
        return
    itemsize = DTYPE_BITS[stored_as] // 8
    if rows.nr_rows * rows.row_length == 0:
        return
    if rows.nr_rows == 1 or rows.row_length * itemsize > CHUNK_NBYTES:
        for _ in range(rows.nr_rows):
            for rank, length in runs(rows, tp):
                for nbytes in _chunks(length * itemsize):
                    slices[rank].append(_cast(reader.take(nbytes), stored_as, tensor.dtype))
        return
    per_chunk = CHUNK_NBYTES // (rows.row_length * itemsize)
    for first in range(0, rows.nr_rows, per_chunk):
        nr_rows = min(per_chunk, rows.nr_rows - first)
        data = _cast(reader.take(nr_rows * rows.row_length * itemsize), stored_as, tensor.dtype)
        for rank, share in enumerate(_gather(data, nr_rows, rows, DTYPE_BITS[tensor.dtype] // 8, tp)):
            slices[rank].append(share)


def _chunks(nbytes: int, limit: int | None = None) -> Iterator[int]:
    """`nbytes` in pieces of at most a chunk, or of at most `limit` rounded down to whole elements."""
    limit = CHUNK_NBYTES if limit is None else max(8, limit // 8 * 8)
    while nbytes:
        yield min(nbytes, limit)
        nbytes -= min(nbytes, limit)


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


def _gather(data: memoryview, nr_rows: int, rows: Rows, itemsize: int, tp: int) -> Iterator[memoryview]:
    """Each rank's columns of `nr_rows` whole rows, contiguous."""
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

    from .dtypes import torch_dtype

    tensor = torch.frombuffer(data, dtype=torch_dtype(source)).to(torch_dtype(target))
    return tensor.view(torch.uint8).numpy().data
