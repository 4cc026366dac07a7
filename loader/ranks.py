"""Which rank of how many this process is, on which device, and whether all ranks agree."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardconv.errors import LoadError, ShardconvError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The tensor-parallel group of this process."""

    rank: int  # within the group, not the global one
    size: int
    group: Any  # a ProcessGroup; None when one process runs alone

    @property
    def group_name(self) -> str:
        """The name that functional collectives know the group by."""
        return str(self.group.group_name) if self.group is not None else ""


def ranks_of(group: Any = None) -> Ranks:
    """The ranks of `group`: a process group, a one-dimensional device mesh, or None for all processes.

    Raises `LoadError` when there is no process group although several processes were started (the rank is never
    guessed), when a mesh has several dims, and when this process is not in the group.
    """
    if group is not None and hasattr(group, "mesh_dim_names"):
        if group.ndim != 1:
            raise LoadError(
                f"group: expected a device mesh of one dim, found {group.ndim} {group.mesh_dim_names}; "
                'give one of them, such as mesh["tp"]'
            )
        try:
            group = group.get_group()
        except (IndexError, RuntimeError):  # what torch raises in a process that is not in the mesh
            raise LoadError(_outside()) from None
    if not (dist.is_available() and dist.is_initialized()):
        world = os.environ.get("WORLD_SIZE", "1")
        if group is not None or world != "1":
            raise LoadError(
                f"WORLD_SIZE is {world} but torch.distributed is not initialized; call "
                "torch.distributed.init_process_group() first"
            )
        return Ranks(0, 1, None)
    group = group if group is not None else dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise LoadError(_outside())
    return Ranks(rank, dist.get_world_size(group), group)


def _outside() -> str:
    return f"group: global rank {dist.get_rank()} is not in it; load on its members only"


def place_of(device: torch.device | str | int | None) -> torch.device:
    """`device` with its index; None, and an accelerator without one, is this rank's own."""
    place = None if device is None else torch.device(device)
    if place is None or (place.index is None and place.type != "cpu"):
        own = default_device()
        if place is not None and place.type != own.type:
            raise LoadError(f"device: {place.type!r} was asked for, this process sees {own.type!r} only; leave it out")
        return own
    if place.type != "cpu" and place.index is not None and torch.accelerator.is_available():
        torch.accelerator.set_device_index(place.index)  # collectives of objects go through the current device
    return place


def default_device() -> torch.device:
    """This process's accelerator, by LOCAL_RANK, made the current one; the CPU where there is none.

    Raises `LoadError` when LOCAL_RANK points beyond the visible devices, instead of piling two ranks on one.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    visible = torch.accelerator.device_count()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= visible:
        raise LoadError(
            f"LOCAL_RANK is {local} but {visible} accelerator(s) are visible; start fewer ranks on this node, or, "
            'where each process sees only its own, pass device="cuda:0"'
        )
    torch.accelerator.set_device_index(local)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, local)


def agree(ranks: Ranks, told: Any, error: Exception | None) -> list[Any]:
    """Exchange `told` and `error` with every rank; returns what each rank told, by rank.

    One small collective. When any rank has an error every rank raises: alone its own error, in a group a `LoadError`
    that names the ranks and their reasons, the same on all of them.
    """
    if ranks.group is None:
        if error is not None:
            raise error
        return [told]
    heard: list[Any] = [None] * ranks.size
    dist.all_gather_object(heard, (told, _reasons(error)), group=ranks.group)
    issues = [f"rank {rank}: {reason}" for rank, (_, reasons) in enumerate(heard) for reason in reasons]
    if issues:
        # A fault we know needs no second traceback; one we do not know does.
        raise LoadError(*_merge_equal(heard, issues)) from (None if isinstance(error, ShardconvError) else error)
    return [told for told, _ in heard]


def together(ranks: Ranks, step: Callable[[], T]) -> list[T]:
    """Run `step` here and on every other rank; what it gave, by rank as far as it travels (this rank's as it is).

    Raises as `agree` does when it fails on any rank, so that none goes on alone.
    """
    result, error = None, None
    try:
        result = step()
    except Exception as raised:  # told to every rank, which raise it together
        error = raised
    told = agree(ranks, result if isinstance(result, str) else None, error)
    told[ranks.rank] = result
    return told


def _reasons(error: Exception | None) -> tuple[str, ...]:
    if error is None:
        return ()
    if isinstance(error, ShardconvError):
        return error.issues
    return (f"{type(error).__name__}: {error}",)


def _merge_equal(heard: list[Any], issues: list[str]) -> list[str]:
    """One line for a reason that every rank has."""
    first = heard[0][1]
    if first and all(reasons == first for _, reasons in heard):
        return [f"every rank: {reason}" for reason in first]
    return issues
