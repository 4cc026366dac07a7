"""Which rank of how many this process is, and on which device."""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardconv.errors import LoadError, ShardconvWarning, UsageError

# How many processes were started, as srun, Open MPI, MPICH and Intel MPI, MVAPICH and Flux tell each of them. Of a row
# the first that is set counts: a job of several tasks may run steps of one.
_LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    ("OMPI_COMM_WORLD_SIZE",),
    ("PMI_SIZE",),
    ("MV2_COMM_WORLD_SIZE",),
    ("FLUX_JOB_SIZE",),
)
TIMEOUT_S = 600.0  # seconds that a rank which is done waits for the slowest, unless told otherwise


@dataclass(frozen=True, slots=True)
class Ranks:
    """The tensor-parallel group of this process."""

    rank: int  # within the group, not the global one
    size: int
    group: Any  # a ProcessGroup; None when one process runs alone
    timeout_s: float  # seconds that this rank, when it is done, waits for the slowest

    @property
    def group_name(self) -> str:
        """The name that functional collectives know the group by."""
        return str(self.group.group_name) if self.group is not None else ""


def ranks_of(group: Any = None, timeout: float = TIMEOUT_S) -> Ranks:
    """The ranks of `group`: a process group, a one-dimensional device mesh, or None for all processes.

    Raises `UsageError` for a `timeout` that is no number of seconds; `LoadError` when there is no process group
    although several processes were started (the rank is never guessed), when a mesh has several dims, and when this
    process is not in the group.
    """
    if not (isinstance(timeout, (int, float)) and timeout > 0):
        raise UsageError(f"timeout: expected a number of seconds above 0, found {timeout!r}")
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
        world = os.environ.get("WORLD_SIZE") or "1"
        if group is not None or world != "1":
            raise LoadError(
                f"WORLD_SIZE is {world} but torch.distributed is not initialized; call "
                "torch.distributed.init_process_group() first"
            )
        _warn_alone()
        return Ranks(0, 1, None, timeout)
    group = group if group is not None else dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise LoadError(_outside())
    return Ranks(rank, dist.get_world_size(group), group, timeout)


def ranks_of_node() -> int:
    """How many ranks share this machine, as torchrun says (LOCAL_WORLD_SIZE); 1 when nobody says a number."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isascii() and told.isdigit() else 1


@functools.cache
def _warn_alone() -> None:
    """One sentence a process, where a launcher seems to have started several that know nothing of each other."""
    set_ones = [next((name for name in names if name in os.environ), "") for names in _LAUNCHERS]
    several = [name for name in set_ones if os.environ.get(name, "").isdecimal() and int(os.environ[name]) > 1]
    if several:
        warnings.warn(
            f"{several[0]} is {os.environ[several[0]]}, but torch.distributed is not initialized: each of these "
            "processes loads the whole model for itself; to share it, set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT "
            "from the launcher's variables and call torch.distributed.init_process_group(), or start with torchrun",
            ShardconvWarning,
            stacklevel=4,
        )


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
        torch.accelerator.set_device_index(place.index)  # what the model's collectives go through
    return place


def default_device() -> torch.device:
    """This process's accelerator, by LOCAL_RANK, made the current one; the CPU where there is none.

    Raises `LoadError` when LOCAL_RANK points beyond the visible devices, instead of piling two ranks on one.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    visible = torch.accelerator.device_count()
    told = os.environ.get("LOCAL_RANK") or "0"
    if not (told.isascii() and told.isdigit()):
        raise LoadError(f'LOCAL_RANK: expected a number, found {told!r}; start with torchrun, or pass device="cuda:0"')
    local = int(told)
    if local >= visible:
        raise LoadError(
            f"LOCAL_RANK is {local} but {visible} accelerator(s) are visible; start fewer ranks on this node, or, "
            'where each process sees only its own, pass device="cuda:0"'
        )
    torch.accelerator.set_device_index(local)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, local)
