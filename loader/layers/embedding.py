"""Embeddings of which each rank holds some rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardconv.format.plan import Style
from shardconv.libraries.torch_private import become
from shardconv.plans.match import PlannedModule

from ..group.ranks import Ranks
from .linear import sum_over_ranks


class VocabularyEmbedding(nn.Embedding):
    """Holds some rows. Input ids `[...]`, output `[..., width]` whole: each value comes from one rank, the others add
    zeros, so that the sum is exact in every dtype."""

    group_name: str
    first: int  # id of the first row that this rank holds

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (the name nn.Embedding uses)
        local = input - self.first
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return sum_over_ranks(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.group_name)


def vocabulary(layer: nn.Embedding, planned: PlannedModule, ranks: Ranks) -> None:
    """Turn an embedding, whose weight is already this rank's, into one that asks the others."""
    layer.num_embeddings //= ranks.size
    layer.padding_idx = None  # its row is on one rank only; it matters to gradients, of which there are none
    become(layer, VocabularyEmbedding, group_name=ranks.group_name, first=ranks.rank * layer.num_embeddings)


MAKERS: Mapping[Style, Mapping[type, Any]] = {Style.VOCABULARY: {nn.Embedding: vocabulary}}
