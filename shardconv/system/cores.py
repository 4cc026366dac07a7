"""How many threads can compute at once. Linux; elsewhere all CPUs count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_V1_MOUNTS = ("cpu", "cpu,cpuacct")  # of the controller, below CGROUPS


def usable_cores(sharing: int = 1) -> int:
    """CPUs for one of `sharing` processes like this one: those that it may run on (taskset, a job's cpuset), and no
    more than its control groups, of version 1 or 2, give it time for; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *_quotas()]) // max(1, sharing))


def _quotas() -> Iterator[int]:
    """CPUs' worth of time, rounded up, that each limited control group of this process has."""
    for folder in _groups():
        try:
            if (folder / "cpu.max").is_file():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                yield -(-int(quota) // int(period))
        except (OSError, ValueError, ZeroDivisionError):  # not there, or "max": no limit
            continue


def _groups() -> Iterator[Path]:
    """Folders of the control groups that may limit this process: its own and all above that are to be seen."""
    try:
        lines = [line.split(":", 2) for line in _MEMBERSHIP.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (line for line in lines if len(line) == 3):
        mounts = [""] if not controllers else _V1_MOUNTS if "cpu" in controllers.split(",") else []
        own = PurePosixPath("" if ".." in path else path.lstrip("/"))  # ..: outside of what a container sees
        for mount in mounts:
            yield from (CGROUPS / mount / group for group in (own, *own.parents))
