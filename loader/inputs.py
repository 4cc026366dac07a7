"""A check against the commonest quiet mistake: ranks that compute from different noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from shardconv.errors import LoadError

from .agreement import together
from .ranks import ranks_of


def check_inputs(model: nn.Module, group: Any = None) -> None:
    """Have the next call of `model` compare its inputs across ranks, once.

    Every rank must call this, with the `group` the model was loaded with, before `torch.compile`. The call after that
    raises `LoadError` on every rank, naming the inputs that differ; later calls cost nothing.
    """
    ranks = ranks_of(group)

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        told = together(ranks, lambda: "\n".join(f"{name} {digest}" for name, digest in _digests(args, kwargs)))
        lines = [set(each.splitlines()) for each in told]
        names = sorted({line.split()[0] for line in lines[0].union(*lines) - lines[0].intersection(*lines)})
        if names:
            raise LoadError(
                f"{type(module).__name__}: the ranks were called with different {', '.join(names)}; give every rank "
                "the same inputs and a generator seeded alike"
            )

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)


def _digests(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, what tells its value) of every input."""
    named = {f"argument-{position}": value for position, value in enumerate(args)} | dict(kwargs)
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous()
            digest = xxhash.xxh3_128(f"{data.dtype} {tuple(data.shape)}".encode())
            digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
            yield name, digest.hexdigest()
        elif isinstance(value, (list, tuple)):
            yield from _digests((), {f"{name}-{position}": item for position, item in enumerate(value)})
        else:
            yield name, xxhash.xxh3_128_hexdigest(repr(value).encode())
