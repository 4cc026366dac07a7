"""Whether another process of this machine has ended, told by what it left behind while it lived. Linux; elsewhere no
process is known to have ended."""

from __future__ import annotations

import os
from pathlib import Path


def this_process() -> str:
    """What `has_ended` needs to know of this process: machine and namespace, process id, start time; "" if unknown."""
    try:
        return f"{_machine()} {os.getpid()} {_state_and_start(os.getpid())[1]}"
    except OSError:
        return ""


def has_ended(process: str) -> bool:
    """Whether `process`, a `this_process()`, is known to have ended: False for one of another machine."""
    try:
        machine, pid, start = process.split()
        if machine != _machine():
            return False
        os.kill(int(pid), 0)  # asks only
        state, started = _state_and_start(int(pid))
    except ProcessLookupError:
        return True
    except (ValueError, OSError):
        return False
    return state in "ZX" or started != start


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _state_and_start(pid: int) -> tuple[str, str]:
    """A letter, Z for a process that has ended and was not waited for; clock ticks since the machine started."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
