"""Moves bytes: reads each source tensor once, in order, and appends every rank's share to its file.

Knows nothing of models. Each worker thread takes one tensor at a time and holds at most two chunks of memory; reading,
hashing, gathering and writing all release the interpreter lock, so two workers keep two cores busy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from .checkpoint import SourceTensor
from .cut import Rows, runs
from .errors import CheckpointError
from .header import DTYPE_BITS
from .layout import ConvertPlan, StoredTensor

CHUNK_NBYTES = 8 << 20  # bytes read at once by a worker
WORKERS = max(2, min(4, os.cpu_count() or 1))

Progress = Callable[[int], None]  # called with a number of source bytes just dealt with


@dataclass(frozen=True, slots=True)
class TensorDigests:
    """xxh3-128, hex."""

    source: str  # of the source bytes
    slices: tuple[str, ...]  # of the stored bytes, one a rank; a single one when whole


@dataclass(slots=True)
class _Slice:
    """What one rank (or, for a whole tensor, every file that takes it) receives, appended to."""

    places: list[tuple[int, int]]  # (file descriptor, absolute byte offset) of the next byte
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    def append(self, data: memoryview) -> None:
        self.digest.update(data)
        for i, (fd, offset) in enumerate(self.places):
            write_all(fd, data, offset)
            self.places[i] = fd, offset + data.nbytes


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """`pwrite` until every byte of `data` is written. Raises `OSError` as the system does."""
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


class _Reader:
    """Sequential reads of one tensor's source bytes into one reused buffer, digested on the way."""

    def __init__(self, fd: int, source: SourceTensor, buffer: memoryview, stop: threading.Event, progress: Progress):
        self._fd, self._source, self._buffer = fd, source, buffer
        self._stop, self._progress = stop, progress
        self._offset = source.offset
        self.digest = xxhash.xxh3_128()

    def take(self, nbytes: int) -> memoryview:
        """The next `nbytes` (at most the buffer); valid until the next call."""
        if self._stop.is_set():
            raise _Stopped
        view = self._buffer[:nbytes]
        position = 0
        while position < nbytes:
            nr_read = os.preadv(self._fd, [view[position:]], self._offset + position)
            if nr_read == 0:
                name = self._source.file.name
                raise CheckpointError(f"{name}: the file became shorter while it was read; leave it alone and rerun")
            position += nr_read
        self._offset += nbytes
        self.digest.update(view)
        self._progress(nbytes)
        return view


class _Stopped(Exception):
    """Another worker failed; its error is the one to report."""


def run(plan: ConvertPlan, outputs: Sequence[int], progress: Progress) -> Mapping[str, TensorDigests]:
    """Carry out `plan`. `outputs` are writable file descriptors, one for each file of the layout.

    Returns the digests by tensor name. Memory: WORKERS times two chunks. Raises `CheckpointError` when a source file
    changes under the reader, `OSError` when the system refuses a read or a write; nothing is retried.
    """

    def targets(tensor: StoredTensor) -> list[_Slice]:
        places = [(outputs[index], offset) for index, offset in plan.layout.starts[tensor.name]]
        return [_Slice([place]) for place in places] if tensor.cut else [_Slice(places)]

    return _for_each(plan, targets, progress)


def digest_sources(plan: ConvertPlan, progress: Progress) -> Mapping[str, str]:
    """xxh3-128 of every source tensor of `plan`, by name; reads everything, writes nothing."""
    digests = _for_each(plan, lambda tensor: [], progress)
    return {name: each.source for name, each in digests.items()}


def _for_each(
    plan: ConvertPlan, targets: Callable[[StoredTensor], list[_Slice]], progress: Progress
) -> Mapping[str, TensorDigests]:
    stop, local = threading.Event(), threading.local()
    with ExitStack() as stack:
        paths = {source.file.path for source in plan.sources.values()}
        fds = {path: _open(path, stack) for path in paths}

        def work(tensor: StoredTensor) -> TensorDigests:
            source = plan.sources[tensor.name]
            buffer = local.__dict__.setdefault("buffer", memoryview(bytearray(CHUNK_NBYTES)))
            reader = _Reader(fds[source.file.path], source, buffer, stop, progress)
            slices = targets(tensor)
            _route(tensor, source, reader, slices, plan.layout.tp)
            return TensorDigests(reader.digest.hexdigest(), tuple(each.digest.hexdigest() for each in slices))

        executor = stack.enter_context(ThreadPoolExecutor(WORKERS, "shardconv"))
        try:
            futures = {tensor.name: executor.submit(work, tensor) for tensor in plan.layout.tensors}
            wait(futures.values(), return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            executor.shutdown(cancel_futures=True)
        failed = [future.exception() for future in futures.values() if not future.cancelled()]
        for error in failed:
            if error is not None and not isinstance(error, _Stopped):
                raise error
        return {name: future.result() for name, future in futures.items()}


def _open(path: Path, stack: ExitStack) -> int:
    fd = os.open(path, os.O_RDONLY)
    stack.callback(os.close, fd)
    return fd


def _route(tensor: StoredTensor, source: SourceTensor, reader: _Reader, slices: Sequence[_Slice], tp: int) -> None:
    """Send every byte of one tensor to the slices it belongs to; without slices it is only read."""
    rows = tensor.rows()
    if not slices or rows is None:
        for nbytes in _chunks(source.entry.nbytes):
            data = _cast(reader.take(nbytes), source.entry.dtype, tensor.dtype)
            for each in slices:
                each.append(data)
        return
    itemsize = DTYPE_BITS[source.entry.dtype] // 8
    if rows.nr_rows == 1 or rows.row_length * itemsize > CHUNK_NBYTES:
        for _ in range(rows.nr_rows):
            for rank, length in runs(rows, tp):
                for nbytes in _chunks(length * itemsize):
                    slices[rank].append(_cast(reader.take(nbytes), source.entry.dtype, tensor.dtype))
        return
    per_chunk = CHUNK_NBYTES // max(1, rows.row_length * itemsize)
    for first in range(0, rows.nr_rows, per_chunk):
        nr_rows = min(per_chunk, rows.nr_rows - first)
        data = _cast(reader.take(nr_rows * rows.row_length * itemsize), source.entry.dtype, tensor.dtype)
        for rank, share in enumerate(_gather(data, nr_rows, rows, DTYPE_BITS[tensor.dtype] // 8, tp)):
            slices[rank].append(share)


def _chunks(nbytes: int) -> Iterator[int]:
    """`nbytes` in pieces of at most a chunk."""
    while nbytes:
        yield min(nbytes, CHUNK_NBYTES)
        nbytes -= min(nbytes, CHUNK_NBYTES)


def _gather(data: memoryview, nr_rows: int, rows: Rows, itemsize: int, tp: int) -> Iterator[memoryview]:
    """Each rank's columns of `nr_rows` whole rows, contiguous."""
    table = np.frombuffer(data, np.uint8).reshape(nr_rows, rows.row_length * itemsize)
    for rank in range(tp):
        share = np.empty((nr_rows, rows.row_length * itemsize // tp), np.uint8)
        source = target = 0
        for block in rows.blocks:
            part = block * itemsize // tp
            share[:, target : target + part] = table[:, source + rank * part : source + (rank + 1) * part]
            source, target = source + block * itemsize, target + part
        yield share.data.cast("B")


def _cast(data: memoryview, source: str, target: str) -> memoryview:
    """`data` as elements of `target`; the same bytes when nothing changes. Rounds to nearest even, as torch does."""
    if source == target or not data.nbytes:
        return data
    import torch

    from .dtypes import torch_dtype

    tensor = torch.frombuffer(data, dtype=torch_dtype(source)).to(torch_dtype(target))
    return tensor.view(torch.uint8).numpy().data
