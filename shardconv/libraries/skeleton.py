"""A model's skeleton: parameters on the meta device, everything else real; and what is read from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .base import BUILDING
from .choose import library_of

if TYPE_CHECKING:
    import torch
    from torch import nn


def skeleton(cls: Any, config: Mapping[str, Any], dtype: torch.dtype | None = None) -> Any:
    """A model of `cls` with every parameter on meta, costing no memory for weights, in eval mode.

    Buffers and plain-attribute tables (QwenImage's `pos_freqs`) are computed for real, under the default `dtype` as
    diffusers does. Raises `CheckpointError` when `config` does not build the class.
    """
    import torch

    from .torch_private import parameters_on_meta

    with BUILDING:
        previous = torch.get_default_dtype()
        try:
            if dtype is not None:
                torch.set_default_dtype(dtype)
            with parameters_on_meta():
                model = library_of(cls).build(cls, config)
        except Exception as error:  # the constructor is the library's own code and raises whatever a bad config causes
            raise CheckpointError(
                f"config.json: does not build a {cls.__name__} ({type(error).__name__}: {error}); fetch it again"
            ) from error
        finally:
            torch.set_default_dtype(previous)
    return model.eval()


def stored_tensors(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter and persistent buffer, in the model's own order."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of two or more names that are one parameter object."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def kept_in_fp32(parameter: str, modules: Sequence[str]) -> bool:
    """diffusers' own test: one of `modules` is a whole component of the dotted parameter name."""
    return not set(modules).isdisjoint(parameter.split("."))
