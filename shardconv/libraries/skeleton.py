"""A model's skeleton: parameters on the meta device, everything else real; and what is read from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .base import BUILDING
from .choose import library_of

if TYPE_CHECKING:
    import torch


def skeleton(cls: Any, config: Mapping[str, Any], dtype: torch.dtype | None = None) -> Any:
    """A model of `cls` with every parameter on meta, costing no memory for weights, in eval mode.

    Buffers and plain-attribute tables (QwenImage's `pos_freqs`) are computed for real, under the default `dtype` as
    diffusers does. Raises `CheckpointError` when `config` does not build the class.
    """
    import torch

    with BUILDING:
        previous = torch.get_default_dtype()
        try:
            if dtype is not None:
                torch.set_default_dtype(dtype)
            with _parameters_on_meta():
                model = library_of(cls).build(cls, config)
        except Exception as error:  # the constructor is the library's own code and raises whatever a bad config causes
            raise CheckpointError(
                f"config.json: does not build a {cls.__name__} ({type(error).__name__}: {error}); fetch it again"
            ) from error
        finally:
            torch.set_default_dtype(previous)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    import torch

    register, builder = torch.nn.Module.register_parameter, threading.get_ident()

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        # A parameter already on meta is kept as it is, so that tied ones stay one object.
        # What another thread builds meanwhile is none of ours.
        if threading.get_ident() == builder and parameter is not None and parameter.device.type != "meta":
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def stored_tensors(model: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter and persistent buffer, in the model's own order."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}


def tied_names(model: Any) -> list[tuple[str, ...]]:
    """Groups of two or more names that are one parameter object."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def kept_in_fp32(parameter: str, modules: Sequence[str]) -> bool:
    """diffusers' own test: one of `modules` is a whole component of the dotted parameter name."""
    return not set(modules).isdisjoint(parameter.split("."))
