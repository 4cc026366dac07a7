"""A check against the commonest quiet mistake: ranks that compute from different noise."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardconv.errors import LoadError, ShardconvWarning

from .group.agreement import exchange
from .group.ranks import Ranks, ranks_of
from .layers.refusals import check_model

MAX_VALUES = 100_000  # looked at in one call; what holds more, such as a whole pipeline, was not meant as an input
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.layout, np.generic, range, slice, type)
_DEVICES = (torch.device, torch.Stream)  # each rank has its own


def check_inputs(model: nn.Module, group: Any = None) -> None:
    """Have the next call of `model` compare its inputs across ranks, once.

    What `load_model`, `load_pipeline` and `parallelize` return does so by itself, once. Every rank must call this, with
    the `group` the model was loaded with. The call of the model after that raises `LoadError` on every rank, naming the
    inputs that differ; later calls cost nothing. Tensors are compared wherever they are: in dicts, lists and objects;
    those that a cache holds by their shapes, as each rank keeps its own heads there. Inputs that cannot be compared
    (functions, modules) are named in a `ShardconvWarning`. A call inside `torch.compile` compares nothing.

    Raises `UsageError` for a pipeline or a compiled model, give the model itself.
    """
    check_model(model)
    compare_next_call(model, ranks_of(group))


def compare_next_call(model: nn.Module, ranks: Ranks) -> None:
    """As `check_inputs`, for a model that is known to be one; nothing to do for one rank."""
    if ranks.size == 1:
        return
    first_call = _FirstCall(ranks)
    first_call.handle = model.register_forward_pre_hook(first_call, with_kwargs=True)


@dataclass(slots=True)
class _FirstCall:
    """A hook that looks once. A model can be copied and pickled with it; what comes of that looks no more."""

    ranks: Ranks | None
    handle: RemovableHandle | None = None

    def __reduce__(self) -> tuple[type, tuple[None]]:
        return _FirstCall, (None,)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.ranks is None or torch.compiler.is_compiling():  # stays out of the graph
            return
        ranks, self.ranks = self.ranks, None
        if self.handle is not None:
            self.handle.remove()
        _compare(type(module).__name__, args, kwargs, ranks)


def _compare(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: Ranks) -> None:
    walk = _Walk()
    named = {f"argument-{position}": value for position, value in enumerate(args)} | dict(kwargs)

    def tell() -> str:
        for key, value in named.items():
            walk.look(key, value)
        return "\n".join(f"{digest} {key}" for key, digest in walk.digests.items())

    told = [set(each.splitlines()) for each in exchange(ranks, tell, "the first call of a model")]
    differing = told[0].union(*told) - told[0].intersection(*told)
    names = sorted({line.split(" ", 1)[1] for line in differing})
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise LoadError(
            f"{name}: the ranks were called with different {shown}; give every rank the same inputs and a generator "
            "with the same seed, such as generator=torch.Generator('cpu').manual_seed(0)"
        )
    if walk.left_out:
        warnings.warn(
            f"{name}: not compared between ranks: {', '.join(sorted(walk.left_out))}", ShardconvWarning, stacklevel=2
        )


@dataclass(slots=True)
class _Walk:
    """Everything that inputs hold."""

    digests: dict[str, str] = field(default_factory=dict)  # where it stands -> what tells its value, not its device
    left_out: set[str] = field(default_factory=set)  # inputs that cannot be compared
    _seen: dict[int, Any] = field(default_factory=dict)  # by id, and kept alive so that no id is used twice

    def look(self, name: str, value: Any, by_shape: bool = False) -> None:
        """Note `value`, called `name`, with all it holds; tensors `by_shape` alone when they are a cache's."""
        if isinstance(value, torch.Tensor):
            self._note(name, _shape(value) if by_shape else _digest(value))
        elif isinstance(value, np.ndarray):
            self._note(name, _hash(f"{value.dtype} {value.shape}", value.tobytes()))
        elif isinstance(value, torch.Generator):
            self._note(name, _digest(value.get_state()))
        elif value is None or isinstance(value, _PLAIN):
            self._note(name, _hash(repr(value)))
        elif isinstance(value, _DEVICES) or id(value) in self._seen:
            return
        elif len(self._seen) >= MAX_VALUES or isinstance(value, nn.Module) or callable(value):
            self.left_out.add(name)
        else:
            self._seen[id(value)] = value
            self._look_inside(name, value, by_shape or "cache" in type(value).__name__.lower())

    def _look_inside(self, name: str, value: Any, by_shape: bool) -> None:
        self._note(name, _hash(type(value).__name__))
        if isinstance(value, Mapping):
            for key in value:
                self.look(f"{name}[{key!r}]" if isinstance(key, _PLAIN) else f"{name}[...]", value[key], by_shape)
        elif isinstance(value, (Sequence, Set)) or hasattr(value, "popleft"):
            items = sorted(value, key=repr) if isinstance(value, Set) else value
            for position, item in enumerate(items):
                self.look(f"{name}-{position}", item, by_shape)
        attributes = dict(_attributes(value))
        if not attributes and not isinstance(value, (Mapping, Sequence, Set)) and not hasattr(value, "popleft"):
            self.left_out.add(name)
        for attribute, held in attributes.items():
            self.look(f"{name}.{attribute}", held, by_shape or "cache" in attribute.lower())

    def _note(self, name: str, digest: str) -> None:
        self.digests[name] = digest


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, by name."""
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in [slots] if isinstance(slots, str) else slots:
            if not slot.startswith("__") and hasattr(value, slot):
                yield slot, getattr(value, slot)


def _shape(tensor: torch.Tensor) -> str:
    return _hash(f"{tensor.dtype} {tuple(tensor.shape)}")


def _digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and values; of shape alone where there are no values to be had."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return _shape(tensor)
    data = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return _hash(f"{data.dtype} {tuple(data.shape)}", data.reshape(-1).view(torch.uint8).numpy().data)


def _hash(text: str, data: Any = b"") -> str:
    digest = xxhash.xxh3_128(text.encode("utf-8", "surrogatepass"))
    digest.update(data)
    return digest.hexdigest()
