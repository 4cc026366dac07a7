"""The arithmetic of slicing: which part of a tensor each rank holds, and which bytes of the source go where.

Pure functions on integers; everything that slices (converter, loader, `parallelize`) asks here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor cut along one dim, each block of that dim on its own.

    Rank r of n holds, of every block in order, the r-th of n equal parts. A plain style is one block.
    """

    dim: int
    block_sizes: tuple[int, ...]  # elements along `dim`; their sum is the whole dim

    def local_shape(self, shape: Sequence[int], tp: int) -> tuple[int, ...]:
        """Shape of one rank's slice of a tensor of `shape`."""
        return tuple(num // tp if dim == self.dim else num for dim, num in enumerate(shape))

    def ranges(self, rank: int, tp: int) -> Iterator[tuple[int, int]]:
        """(start, exclusive end) along `dim` of each part that `rank` holds, in order."""
        offset = 0
        for block in self.block_sizes:
            part = block // tp
            yield offset + rank * part, offset + (rank + 1) * part
            offset += block


def block_sizes(total: int, blocks: Sequence[int]) -> tuple[int, ...] | None:
    """Absolute block sizes from proportions: (1, 1, 3) of 50 gives (10, 10, 30). None when they do not divide it.

    Same rule as diffusers 0.42.1 `hooks/tensor_parallel.py` `_blocks_to_block_sizes`.
    """
    unit, rest = divmod(total, sum(blocks))
    return None if rest else tuple(block * unit for block in blocks)


@dataclass(frozen=True, slots=True)
class Rows:
    """A cut tensor in memory order: `num_rows` equal rows, each made of blocks that are cut on their own. In elements.

    Dim 0 is one row whose blocks are long runs; dim 1 of a weight is one row for each output feature.
    """

    num_rows: int
    blocks: tuple[int, ...]  # elements

    @property
    def row_length(self) -> int:
        """Elements of one source row."""
        return sum(self.blocks)


def rows_of(shape: Sequence[int], cut: Cut) -> Rows:
    """The memory order of a contiguous tensor of `shape` under `cut`."""
    inner = math.prod(shape[cut.dim + 1 :])
    return Rows(math.prod(shape[: cut.dim]), tuple(size * inner for size in cut.block_sizes))


def runs(rows: Rows, source_tp: int, target_tp: int) -> Iterator[tuple[int, int, int]]:
    """(source rank, target rank, elements) of each run of one row, in memory order: the pieces of each block between
    the boundaries of either degree. A degree of 1 is the whole tensor."""
    for block in rows.blocks:
        ends = {block // tp * (rank + 1) for tp in (source_tp, target_tp) for rank in range(tp)}
        start = 0
        for end in sorted(ends - {0}):
            yield start * source_tp // block, start * target_tp // block, end - start
            start = end


def legal_degrees(sizes: Sequence[int], limit: int = 16) -> list[int]:
    """The tp degrees up to `limit` that divide every one of `sizes`."""
    divisor = math.gcd(*sizes)
    return [tp for tp in range(1, limit + 1) if divisor % tp == 0]
