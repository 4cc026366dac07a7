"""`shardconv.format.cut` against the obvious oracle: torch's own split, chunk and cat."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardconv.format.cut import Cut, Rows, block_sizes, legal_degrees, rows_of, runs

if TYPE_CHECKING:
    import torch

Case = tuple[tuple[int, ...], Cut, int]  # shape, cut, tp degree


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A shape of 1 to 3 dims, one of them cut in blocks that the degree divides; sizes of zero included."""
    tp = draw(st.integers(1, 8))
    blocks = tuple(tp * part for part in draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(blocks)
    return tuple(shape), Cut(dim, blocks), tp


def _numbered(shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.arange(math.prod(shape)).view(shape)


def _by_torch(whole: torch.Tensor, cut: Cut, tp: int) -> list[torch.Tensor]:
    """Each rank's slice: split into blocks, each into equal parts, the parts of a rank put together."""
    import torch

    parts = [torch.tensor_split(block, tp, cut.dim) for block in torch.split(whole, cut.block_sizes, cut.dim)]
    return [torch.cat([part[rank] for part in parts], cut.dim) for rank in range(tp)]


@settings(deadline=None)
@given(cases())
def test_ranges_are_the_slices_of_torch(case: Case) -> None:
    """Taking a rank's ranges along the dim gives the slice that torch cuts block by block."""
    import torch

    shape, cut, tp = case
    whole = _numbered(shape)
    for rank, expected in enumerate(_by_torch(whole, cut, tp)):
        taken = [whole.narrow(cut.dim, start, end - start) for start, end in cut.ranges(rank, tp)]
        assert torch.equal(torch.cat(taken, cut.dim), expected)


@settings(deadline=None)
@given(cases())
def test_ranges_cover_the_dim_once(case: Case) -> None:
    """The ranges of all ranks together hold every index of the dim exactly once."""
    shape, cut, tp = case
    held = [index for rank in range(tp) for start, end in cut.ranges(rank, tp) for index in range(start, end)]
    assert sorted(held) == list(range(shape[cut.dim]))


@settings(deadline=None)
@given(cases())
def test_local_shape_is_the_shape_of_the_slice(case: Case) -> None:
    """`local_shape` is the shape of the slice that torch cuts, on every rank."""
    shape, cut, tp = case
    for expected in _by_torch(_numbered(shape), cut, tp):
        assert cut.local_shape(shape, tp) == tuple(expected.shape)


@settings(deadline=None)
@given(cases(), st.integers(1, 3))
def test_runs_route_memory_in_order(case: Case, more: int) -> None:
    """Going through the runs of a row, each taken from the front of its source rank's slice and appended to its target
    rank's, gives every rank of either degree the memory of torch's slice; degree 1 is the whole tensor."""
    shape, cut, tp = case
    cut = Cut(cut.dim, tuple(size * more for size in cut.block_sizes))
    shape = tuple(num * more if dim == cut.dim else num for dim, num in enumerate(shape))
    whole, rows = _numbered(shape), rows_of(shape, cut)
    for source_tp, target_tp in [(1, tp), (tp, 1), (tp, more), (more, tp), (tp * more, tp), (tp, tp * more)]:
        sources = [part.flatten().tolist() for part in _by_torch(whole, cut, source_tp)]
        targets: list[list[int]] = [[] for _ in range(target_tp)]
        positions = [0] * source_tp
        for _ in range(rows.num_rows):
            for source, target, length in runs(rows, source_tp, target_tp):
                targets[target] += sources[source][positions[source] : positions[source] + length]
                positions[source] += length
        assert positions == [len(source) for source in sources]
        assert targets == [part.flatten().tolist() for part in _by_torch(whole, cut, target_tp)]


def test_a_dim_0_cut_is_one_row_of_long_runs() -> None:
    """A cut of dim 0 is one row whatever the width, so that its shares need no gather; dim 1 is a row per output."""
    assert rows_of((6, 10), Cut(0, (2, 4))) == Rows(1, (20, 40))
    assert rows_of((6, 10), Cut(1, (4, 6))) == Rows(6, (4, 6))
    assert list(runs(Rows(1, (20, 40)), 1, 2)) == [(0, 0, 10), (0, 1, 10), (0, 0, 20), (0, 1, 20)]
    assert list(runs(Rows(1, (6,)), 2, 3)) == [(0, 0, 2), (0, 1, 1), (1, 1, 1), (1, 2, 2)]


@settings(deadline=None)
@given(st.integers(1, 400), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_block_sizes_are_those_of_diffusers(total: int, blocks: list[int]) -> None:
    """Proportions become the sizes that diffusers computes, and None exactly where diffusers refuses."""
    from diffusers.hooks.tensor_parallel import _blocks_to_block_sizes

    for whole in (total, total * sum(blocks)):
        try:
            expected = tuple(_blocks_to_block_sizes(whole, blocks))
        except ValueError:
            expected = None
        assert block_sizes(whole, blocks) == expected


def test_block_sizes_by_example() -> None:
    """The example of the docstring, and a sum that does not divide."""
    assert block_sizes(50, (1, 1, 3)) == (10, 10, 30)
    assert block_sizes(51, (1, 1, 3)) is None


@given(st.lists(st.integers(0, 500), min_size=1, max_size=5), st.integers(1, 40))
def test_legal_degrees_are_all_that_divide(sizes: list[int], limit: int) -> None:
    """Exactly the degrees up to the limit that divide every size are offered."""
    expected = [tp for tp in range(1, limit + 1) if all(size % tp == 0 for size in sizes)]
    assert legal_degrees(sizes, limit) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"), [([24, 3072], [1, 2, 3, 4, 6, 8, 12]), ([24, 64, 64, 64], [1, 2, 4, 8]), ([7], [1, 7])]
)
def test_legal_degrees_by_example(sizes: list[int], expected: list[int]) -> None:
    """Heads of FLUX.1, three fused blocks of 64 rows (C6), and a prime."""
    assert legal_degrees(sizes) == expected
