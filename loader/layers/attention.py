"""What attention code needs besides sharded layers, as the catalogue says for its class: counts, tables, sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardconv.format.cut import Cut
from shardconv.libraries.torch_private import parameters_held
from shardconv.plans.catalogue import entry_of
from shardconv.plans.catalogue.entry import places_of
from shardconv.plans.heads import local_attributes

from ..group.ranks import Ranks
from .linear import sum_over_ranks

_GROUPED = 8  # torch's grouped matrix products take rows of 16 bytes, which are 8 elements of bf16


def make_counts_local(model: nn.Module, colwise: Sequence[str], ranks: Ranks) -> None:
    """Attention that cuts its projections into `heads` heads has `heads / tp` of them here."""
    for owner, attribute in list(local_attributes(model, colwise)):
        module = model.get_submodule(owner)
        setattr(module, attribute, getattr(module, attribute) // ranks.size)
    entry = entry_of(model)
    for key in entry.config if entry and colwise else ():
        model.register_to_config(**{key: model.config[key] // ranks.size})  # type: ignore[operator, index]


def slice_ropes(model: nn.Module, colwise: Sequence[str], ranks: Ranks) -> None:
    """LTX rotates before it splits heads, so its tables span all heads: each rank takes its part of them."""
    entry = entry_of(model)
    for pattern, arguments in (entry.ropes if entry else {}).items():
        for name, module in _present(model, pattern):
            if any(layer.startswith(f"{name}.") for layer in colwise):
                module.register_forward_pre_hook(_RopeSlicer(arguments, ranks), with_kwargs=True)


class _RopeSlicer:
    """A pre-hook. A table is `[B, T, inner]`, or `[B, heads, T, head_dim / 2]`; a rope is one or a pair of them."""

    def __init__(self, arguments: Sequence[str], ranks: Ranks) -> None:
        self._arguments, self._rank, self._size = tuple(arguments), ranks.rank, ranks.size

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {name: self._cut(value) if name in self._arguments else value for name, value in kwargs.items()}

    def _cut(self, table: Any) -> Any:
        if not isinstance(table, torch.Tensor):
            return table if table is None else tuple(self._cut(each) for each in table)
        dim = 1 if table.ndim == 4 else -1
        part = table.shape[dim] // self._size
        return table.narrow(dim, self._rank * part, part)


def sum_outputs(model: nn.Module, cuts: Mapping[str, tuple[Any, Cut | None]], ranks: Ranks) -> None:
    """Experts whose own parameters are cut give a part of the sum over their features."""
    entry = entry_of(model)
    for pattern in entry.summed if entry else ():
        for name, module in _present(model, pattern):
            mine = [cut for leaf in parameters_held(module) if (cut := cuts.get(f"{name}.{leaf}", (None, None))[1])]
            if mine:
                module.register_forward_hook(_Summed(ranks.group_name))
            if any(block // ranks.size % _GROUPED for cut in mine for block in cut.block_sizes):
                module.use_grouped_mm = False  # type: ignore[assignment]  # the same sums, one expert after another


class _Summed:
    """A hook. The output is one tensor."""

    def __init__(self, group_name: str) -> None:
        self._group_name = group_name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(output, self._group_name)


def _present(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in places_of(model, pattern) if module is not None)
