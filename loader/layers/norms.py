"""Norms over a dim that the ranks share: statistics are summed, each rank normalizes the features it holds.

Wan, LTX, HiDream and others take the norm of queries and keys over all heads at once. A rank that took it over its own
heads would run and be quietly wrong. Each class here follows the dtype rules of the one it stands in for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardconv.format.plan import Style
from shardconv.libraries.base import BUILDING
from shardconv.libraries.torch_private import become
from shardconv.plans.match import PlannedModule

from ..group.ranks import Ranks
from .linear import sum_over_ranks

with BUILDING:
    from diffusers.models.normalization import LpNorm
    from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The dtype that torch's norms compute in: float32, for double double."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class RMSNormAcrossRanks(nn.RMSNorm):
    """`nn.RMSNorm` of `[..., features]`, of which this rank holds `features / tp`: everything in float32."""

    group_name: str
    whole_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = _wide(x)
        mean = sum_over_ranks(wide.square().sum(-1, keepdim=True), self.group_name) / self.whole_features
        normed = wide * torch.rsqrt(mean + (torch.finfo(wide.dtype).eps if self.eps is None else self.eps))
        return (normed if self.weight is None else normed * self.weight).type_as(x)


class LayerNormAcrossRanks(nn.LayerNorm):
    """`nn.LayerNorm` likewise; two sums, mean first, because the difference of large squares would lose digits."""

    group_name: str
    whole_features: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        wide = _wide(input)
        centred = wide - sum_over_ranks(wide.sum(-1, keepdim=True), self.group_name) / self.whole_features
        variance = sum_over_ranks(centred.square().sum(-1, keepdim=True), self.group_name) / self.whole_features
        normed = centred * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            normed = normed * self.weight
        return (normed if self.bias is None else normed + self.bias).type_as(input)


class DiffusersRMSNormAcrossRanks(DiffusersRMSNorm):  # type: ignore[misc]
    """diffusers' `RMSNorm` likewise: float32 statistics, and the product in the dtype of the weight."""

    group_name: str
    whole_features: int

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        squares = hidden_states.float().square().sum(-1, keepdim=True)
        mean = sum_over_ranks(squares, self.group_name) / self.whole_features
        normed = hidden_states * torch.rsqrt(mean + self.eps)
        if self.weight is None:
            return normed.to(hidden_states.dtype)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            normed = normed.to(self.weight.dtype)
        weighted: torch.Tensor = normed * self.weight
        return weighted if self.bias is None else weighted + self.bias


class LpNormAcrossRanks(LpNorm):  # type: ignore[misc]
    """diffusers' `LpNorm` of the last dim likewise: no weight, and a floor instead of an addend."""

    group_name: str
    whole_features: int

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        powers = _wide(hidden_states).abs().pow(self.p).sum(-1, keepdim=True)
        length = sum_over_ranks(powers, self.group_name).pow(1 / self.p)
        return hidden_states / length.to(hidden_states.dtype).clamp_min(self.eps)


KINDS: dict[type, type] = {
    nn.RMSNorm: RMSNormAcrossRanks,
    nn.LayerNorm: LayerNormAcrossRanks,
    DiffusersRMSNorm: DiffusersRMSNormAcrossRanks,
    LpNorm: LpNormAcrossRanks,
}


def across_ranks(norm: nn.Module, planned: PlannedModule, ranks: Ranks) -> None:
    """Turn a norm, whose parameters are already this rank's, into the one that shares its statistics."""
    become(norm, KINDS[type(norm)], group_name=ranks.group_name, whole_features=sum(planned.cut.block_sizes))


MAKERS: Mapping[Style, Mapping[type, Any]] = {Style.NORM_ACROSS_HEADS: dict.fromkeys(KINDS, across_ranks)}
