"""The way of one tensor's bytes: from the slices of some ranks to those of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..format.cut import Rows, runs
from ..format.dtypes import DTYPE_BITS, nbytes_of
from ..format.layout import StoredTensor
from . import pool
from .pool import Reader, SliceWriter, chunks
from .transform import Transform


def route(tensor: StoredTensor, transform: Transform, readers: Sequence[Reader], slices: Sequence[SliceWriter]) -> None:
    """Send every byte of one tensor through `transform` to the slices it belongs to."""
    rows = tensor.rows()
    if rows is None:
        for nbytes in chunks(nbytes_of(transform.reads, tensor.shape)):
            slices[0].append(transform(readers[0].take(nbytes)))
        return
    itemsize = DTYPE_BITS[transform.reads] // 8
    if rows.num_rows * rows.row_length == 0:
        return
    if rows.num_rows == 1 or rows.row_length * itemsize > pool.CHUNK_NBYTES:
        for _ in range(rows.num_rows):
            for source, target, length in runs(rows, len(readers), len(slices)):
                for nbytes in chunks(length * itemsize):
                    slices[target].append(transform(readers[source].take(nbytes)))
        return
    per_chunk = pool.CHUNK_NBYTES // (rows.row_length * itemsize)
    for first in range(0, rows.num_rows, per_chunk):
        num_rows = min(per_chunk, rows.num_rows - first)
        data = transform(_assemble(readers, num_rows, rows, itemsize))
        for rank, share in enumerate(_gather(data, num_rows, rows, DTYPE_BITS[transform.gives] // 8, len(slices))):
            slices[rank].append(share)


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


def _assemble(readers: Sequence[Reader], num_rows: int, rows: Rows, itemsize: int) -> memoryview:
    """The next `num_rows` whole rows, from the columns that each reader has of them."""
    row_nbytes = rows.row_length * itemsize
    if len(readers) == 1:
        return readers[0].take(num_rows * row_nbytes)
    table = np.empty((num_rows, row_nbytes), np.uint8)
    for rank, reader in enumerate(readers):
        data = reader.take(num_rows * row_nbytes // len(readers))
        part = np.frombuffer(data, np.uint8).reshape(num_rows, row_nbytes // len(readers))
        for place in _columns(rows, rank, itemsize, len(readers)):
            table[:, place.whole] = part[:, place.local]
    return table.data.cast("B")


def _gather(data: memoryview, num_rows: int, rows: Rows, itemsize: int, tp: int) -> Iterator[memoryview]:
    """Each rank's columns of `num_rows` whole rows, contiguous."""
    if tp == 1:
        yield data
        return
    table = np.frombuffer(data, np.uint8).reshape(num_rows, rows.row_length * itemsize)
    for rank in range(tp):
        share = np.empty((num_rows, rows.row_length * itemsize // tp), np.uint8)
        for place in _columns(rows, rank, itemsize, tp):
            share[:, place.local] = table[:, place.whole]
        yield share.data.cast("B")
