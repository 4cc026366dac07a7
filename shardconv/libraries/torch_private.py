"""Every name of torch that is private, or that a version brought, and that we need; `tests/contracts` holds them
against the installed one. Importing this module imports torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def store_of(group: Any) -> Any:
    """The key-value store (`torch.distributed.Store`) that the ranks of a process group share."""
    from torch.distributed.distributed_c10d import _world

    return _world.pg_map[group][1]


def sum_in_place(partial: torch.Tensor, group_name: str) -> torch.Tensor:
    """The sum of every rank's `partial`, as a functional collective, which the compiler traces without a graph break.
    Nobody may use `partial` afterwards."""
    collectives = torch.ops._c10d_functional
    # In place, as nobody else has `partial`; the compiler wants the functional one and makes it in place itself.
    reduce = collectives.all_reduce if torch.compiler.is_compiling() else collectives.all_reduce_
    summed: torch.Tensor = collectives.wait_tensor(reduce(partial, "sum", group_name))
    return summed


def convolve(conv: nn.Conv2d, image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What `conv` computes, padding modes included, with another weight and bias."""
    made: torch.Tensor = conv._conv_forward(image, weight, bias)
    return made


def become(module: nn.Module, cls: type, **attributes: object) -> None:
    """Give a module another class, in place, so that hooks, attributes and a module shared by two parents keep
    working. Plain `attributes` go past what modules do with tensors."""
    module.__class__ = cls
    module.__dict__.update(attributes)


def parameters_held(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Leaf name -> parameter that stands in this module itself; may be written to."""
    return module._parameters


def buffers_held(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """As `parameters_held`, of buffers."""
    return module._buffers


def modules_held(module: nn.Module) -> dict[str, nn.Module | None]:
    """As `parameters_held`, of modules."""
    return module._modules


def empty_like(module: nn.Module, modules: dict[str, nn.Module | None] | None = None) -> Any:
    """A module of the same class that holds nothing, or only `modules`; its constructor is not run."""
    empty = type(module).__new__(type(module))
    nn.Module.__init__(empty)
    if modules is not None:
        empty._modules = modules
    return empty


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters that this thread registers meanwhile have no memory."""
    register, builder = nn.Module.register_parameter, threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A parameter already on meta is kept as it is, so that tied ones stay one object.
        # What another thread builds meanwhile is none of ours.
        if threading.get_ident() == builder and parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
