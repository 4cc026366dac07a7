"""The `Linear` layers and convolutions of a sharded model: plain local tensors and one functional all-reduce.

Functional collectives are traced by `torch.compile` without a graph break. The modules are for inference: the
all-reduce has no gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardconv.format.plan import Style


def sum_over_ranks(partial: torch.Tensor, group_name: str) -> torch.Tensor:
    """The sum of every rank's `partial`, which nobody may use afterwards: it is summed in place.

    Raises `RuntimeError` when gradients are asked for: the collective has none.
    """
    if torch.is_grad_enabled() and partial.requires_grad:
        raise RuntimeError(
            "a sharded model has no gradients, each rank would get its own wrong ones; run it under torch.no_grad()"
        )
    collectives = torch.ops._c10d_functional
    # In place, as nobody else has `partial`; the compiler wants the functional one and makes it in place itself.
    reduce = collectives.all_reduce if torch.compiler.is_compiling() else collectives.all_reduce_
    summed: torch.Tensor = collectives.wait_tensor(reduce(partial, "sum", group_name))
    return summed


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
        partial = self._conv_forward(input, self.weight, self.bias if self.adds_bias else None)
        return sum_over_ranks(partial, self.group_name)


def make_local_conv(conv: nn.Conv2d, style: Style, rank: int, tp: int, group_name: str) -> None:
    """As `make_local`, for a convolution."""
    if style.is_colwise:
        conv.__class__ = ColwiseConv2d
        conv.out_channels //= tp
        if conv.groups > 1:
            conv.groups //= tp
            conv.in_channels //= tp
        return
    conv.__class__ = RowwiseConv2d
    conv.in_channels //= tp
    conv.__dict__.update(group_name=group_name, adds_bias=rank == 0)


def make_local(linear: nn.Linear, style: Style, rank: int, tp: int, group_name: str) -> None:
    """Turn `linear` into the runtime module of `style`, whose parameters are already this rank's.

    The class is changed in place, so that hooks, attributes and a module shared by two parents keep working.
    """
    if style.is_colwise:
        linear.__class__ = ColwiseLinear
        linear.out_features //= tp
        return
    linear.in_features //= tp
    linear.__class__ = RowwiseSplitInputLinear if style is Style.ROWWISE_SPLIT_INPUT else RowwiseLinear
    linear.__dict__.update(group_name=group_name, adds_bias=rank == 0)
    if isinstance(linear, RowwiseSplitInputLinear):
        linear.first = rank * linear.in_features
        linear.whole_features = tp * linear.in_features
