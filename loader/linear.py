"""The `Linear` layers of a sharded model: plain local tensors and one functional all-reduce.

Functional collectives are traced by `torch.compile` without a graph break. The modules are for inference: the
all-reduce has no gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardconv.plan import Style


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
        total = torch.ops._c10d_functional.all_reduce_(partial, "sum", self.group_name)  # in place: nobody else has it
        summed: torch.Tensor = torch.ops._c10d_functional.wait_tensor(total)
        return summed


class RowwiseSplitInputLinear(RowwiseLinear):
    """A rowwise `Linear` whose input arrives whole, `[..., in]`; each rank takes its part of the last dim."""

    first: int  # index of the first input feature that this rank holds

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input.narrow(-1, self.first, self.in_features))


def make_local(linear: nn.Linear, style: Style, rank: int, tp: int, group_name: str) -> None:
    """Turn `linear` into the runtime module of `style`, whose parameters are already this rank's.

    The class is changed in place, so that hooks, attributes and a module shared by two parents keep working.
    """
    if style.dim == 0:
        linear.__class__ = ColwiseLinear
        linear.out_features //= tp
        return
    linear.in_features //= tp
    linear.__class__ = RowwiseSplitInputLinear if style is Style.ROWWISE_SPLIT_INPUT else RowwiseLinear
    linear.__dict__.update(group_name=group_name, adds_bias=rank == 0)
    if isinstance(linear, RowwiseSplitInputLinear):
        linear.first = rank * linear.in_features
