"""The `Linear` layers and convolutions of a sharded model: plain local tensors and one functional all-reduce.

Functional collectives are traced by `torch.compile` without a graph break. The modules are for inference: the
all-reduce has no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardconv.format.plan import Style
from shardconv.libraries.torch_private import become, convolve, sum_in_place
from shardconv.plans.match import PlannedModule

from ..group.ranks import Ranks


def sum_over_ranks(partial: torch.Tensor, group_name: str) -> torch.Tensor:
    """The sum of every rank's `partial`, which nobody may use afterwards: it is summed in place.

    Raises `RuntimeError` when gradients are asked for: the collective has none.
    """
    if torch.is_grad_enabled() and partial.requires_grad:
        raise RuntimeError(
            "a sharded model has no gradients, each rank would get its own wrong ones; run it under torch.no_grad()"
        )
    return sum_in_place(partial, group_name)


class ColwiseLinear(nn.Linear):
    """Holds some output features, block by block. Input `[..., in]` whole, output `[..., out / tp]` local."""


class RowwiseLinear(nn.Linear):
    """Holds some input features. Input `[..., in / tp]` local, output `[..., out]` summed over the ranks.

    The bias is whole on every rank and takes part once: rank 0's matrix product adds it, at no extra cost.
    """

    group_name: str
    adds_bias: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (the name nn.Linear uses)
        partial = F.linear(input, self.weight, self.bias if self.adds_bias else None)
        return sum_over_ranks(partial, self.group_name)


class RowwiseSplitInputLinear(RowwiseLinear):
    """A rowwise `Linear` whose input arrives whole, `[..., in]`; each rank takes its part of the last dim."""

    first: int  # index of the first input feature that this rank holds
    whole_features: int  # of the input

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        if input.shape[-1] != self.whole_features:  # seen by every rank, or some would wait for the others in vain
            raise RuntimeError(f"expected a whole input of {self.whole_features} features, found {input.shape[-1]}")
        return super().forward(input.narrow(-1, self.first, self.in_features))


class ColwiseConv2d(nn.Conv2d):
    """Holds some output channels (Sana's feed-forward). A depthwise one takes local channels, others whole ones."""


class RowwiseConv2d(nn.Conv2d):
    """Holds some input channels. Input `[B, in / tp, H, W]` local, output `[B, out, H', W']` summed over the ranks."""

    group_name: str
    adds_bias: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        partial = convolve(self, input, self.weight, self.bias if self.adds_bias else None)
        return sum_over_ranks(partial, self.group_name)


# Each turns a layer, whose parameters are already this rank's, into the runtime one.


def colwise_linear(layer: nn.Linear, planned: PlannedModule, ranks: Ranks) -> None:
    """Its output is local."""
    become(layer, ColwiseLinear)
    layer.out_features //= ranks.size


def rowwise_linear(layer: nn.Linear, planned: PlannedModule, ranks: Ranks) -> None:
    """Its input is local, its output summed."""
    layer.in_features //= ranks.size
    become(layer, RowwiseLinear, group_name=ranks.group_name, adds_bias=ranks.rank == 0)


def split_input_linear(layer: nn.Linear, planned: PlannedModule, ranks: Ranks) -> None:
    """Its input is whole, its output summed."""
    rowwise_linear(layer, planned, ranks)
    first, whole = ranks.rank * layer.in_features, ranks.size * layer.in_features
    become(layer, RowwiseSplitInputLinear, first=first, whole_features=whole)


def colwise_conv(layer: nn.Conv2d, planned: PlannedModule, ranks: Ranks) -> None:
    """Its output channels are local; those of a depthwise one, its input channels too."""
    become(layer, ColwiseConv2d)
    layer.out_channels //= ranks.size
    if layer.groups > 1:
        layer.groups //= ranks.size
        layer.in_channels //= ranks.size


def rowwise_conv(layer: nn.Conv2d, planned: PlannedModule, ranks: Ranks) -> None:
    """Its input channels are local, its output summed."""
    layer.in_channels //= ranks.size
    become(layer, RowwiseConv2d, group_name=ranks.group_name, adds_bias=ranks.rank == 0)


_COLWISE = {nn.Linear: colwise_linear, nn.Conv2d: colwise_conv}
_ROWWISE = {nn.Linear: rowwise_linear, nn.Conv2d: rowwise_conv}
MAKERS: Mapping[Style, Mapping[type, Any]] = {
    Style.COLWISE: _COLWISE,
    Style.PACKED_COLWISE: _COLWISE,
    Style.ROWWISE: _ROWWISE,
    Style.PACKED_ROWWISE: _ROWWISE,
    Style.ROWWISE_SPLIT_INPUT: {nn.Linear: split_input_linear},
}
