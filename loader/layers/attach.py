"""Tensors become the parameters and buffers of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardconv.errors import SetError
from shardconv.libraries.torch_private import buffers_held, parameters_held


def attach(model: nn.Module, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give every parameter and persistent buffer its tensor, tied ones one object; other buffers go to `device`."""
    ready: dict[int, nn.Parameter] = {}
    places = list(model.named_parameters(remove_duplicate=False))
    for name, skeleton in places:
        if name in tensors and id(skeleton) not in ready:
            ready[id(skeleton)] = nn.Parameter(tensors[name], requires_grad=False)
    missing = [name for name, skeleton in places if id(skeleton) not in ready]
    if missing:
        raise SetError(f"{missing[0]}: has no tensor in the set ({len(missing)} such); convert again")
    for name, skeleton in places:
        owner, _, leaf = name.rpartition(".")
        parameters_held(model.get_submodule(owner))[leaf] = ready[id(skeleton)]
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        buffers_held(model.get_submodule(owner))[leaf] = tensors[name] if name in tensors else buffer.to(device)
