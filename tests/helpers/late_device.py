"""A stand-in for an accelerator: device "late", whose asynchronous copies happen as late as the rules allow.

A `copy_(..., non_blocking=True)` only notes what to copy; the bytes move when an event recorded after it, its stream or
the device is synchronized, and then from what the source holds by that time. Code that refills a buffer too early, or
uses a result without waiting, gets wrong bytes, always. Reads from the device and allocations wait for nothing.

Tensors go through torch's dispatcher (the Python-backed PrivateUse1 key). Streams, events and pinned memory do not: the
experimental backend has no own ones, so they are replaced in `torch`. Use it in a process of its own: see `ranks.run`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

POISON = 0xAA  # what fresh device memory holds

_place = threading.local()
_streams: list[LateStream] = []
pinned_nbytes: list[int] = []  # of each allocation of pinned memory
_lock = threading.RLock()


class LateStream:
    """Copies in their order, none done before someone waits."""

    def __init__(self, device: Any = None) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.num_done = 0
        _streams.append(self)

    def run_until(self, number: int) -> None:
        with _lock:
            while self.num_done < number:
                self.waiting[self.num_done]()
                self.num_done += 1

    def record_event(self) -> LateEvent:
        return LateEvent(self, len(self.waiting))

    def synchronize(self) -> None:
        self.run_until(len(self.waiting))


class LateEvent:
    """A place in a stream."""

    def __init__(self, stream: LateStream, number: int) -> None:
        self.stream, self.number = stream, number

    def synchronize(self) -> None:
        self.stream.run_until(self.number)


class LateTensor(torch.Tensor):
    """A tensor on "late"; its bytes are those of a tensor of the CPU."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> LateTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, memory.stride(), memory.storage_offset(), dtype=memory.dtype, device="late:0"
        )
        made.memory = memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            return _copy(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            assert kwargs.pop("device") == torch.device("cpu"), kwargs
            return args[0].memory.clone()
        args, kwargs = pytree.tree_map_only(LateTensor, lambda tensor: tensor.memory, (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, LateTensor, func(*args, **kwargs))


def _copy(target: LateTensor, source: torch.Tensor, non_blocking: bool = False) -> LateTensor:
    if non_blocking:
        _place.stream.waiting.append(lambda: target.memory.copy_(source))
    else:
        target.memory.copy_(source)
    return target


def _synchronize(device: Any = None) -> None:
    for stream in _streams:
        stream.synchronize()


@contextmanager
def installed() -> Iterator[None]:
    """Make "late" this process's accelerator. The registration stays for good, so leave it to a process of its own."""
    backend_registration._setup_privateuseone_for_python_backend("late")
    empty = torch.empty

    @torch.library.impl("aten::empty.memory_format", "privateuseone")
    def empty_late(size: Any, **options: Any) -> LateTensor:
        return LateTensor(empty(size, dtype=options["dtype"]).fill_(POISON))

    @torch.library.impl("aten::empty_strided", "privateuseone")
    def empty_strided_late(size: Any, stride: Any, **options: Any) -> LateTensor:
        return LateTensor(torch.empty_strided(size, stride, dtype=options["dtype"]).fill_(0))

    def empty_pinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        if pin_memory:
            pinned_nbytes.append(made.nbytes)
        return made

    with (
        mock.patch.object(torch, "empty", empty_pinned),
        mock.patch.object(torch, "Stream", LateStream),
        mock.patch.object(torch.accelerator, "set_stream", lambda stream: setattr(_place, "stream", stream)),
        mock.patch.object(torch.accelerator, "synchronize", _synchronize),
    ):
        yield
