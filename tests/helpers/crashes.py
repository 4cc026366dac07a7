"""Processes that die: at the n-th change they would make to the disk, or when somebody kills them; and what a power
loss takes. Nothing here is known to the product: the child, forked when all imports are done, watches its own calls.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from shardconv.engine import pool
from shardconv.engine.records import TensorDigests
from shardconv.target import journal

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "ctypes.dlsym")
_CALLS = ("pwrite", "posix_fallocate", "fsync", "fdatasync")  # Python tells no audit hook of these


def start(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons distrust fork beside threads; none run here
        pid = os.fork()
    if pid == 0:
        _end(work)
    return pid


def _end(work: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def was_killed(pid: int) -> bool:
    """Wait for a process that must have ended well or by SIGKILL."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def killed_after(seconds: float, work: Callable[[], object]) -> bool:
    """Whether SIGKILL came before `work` was done."""
    pid = start(work)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return was_killed(pid)


def killed_at(step: int, work: Callable[[], object], losing: Path | None = None) -> bool:
    """Whether `work` came as far as its change number `step` (from 0) and was killed instead of making it.

    With `losing`, a power loss comes with it: what was not synced of the files in that folder is gone.
    """

    def dying() -> None:
        _die_at(step, _Unsynced(losing) if losing else None)
        work()

    return was_killed(start(dying))


def steadily(num_tensors: int) -> None:
    """In a child: one worker, and a journal written after every `num_tensors` tensors, so that steps come in order."""
    pool.WORKERS = 1
    journal.INTERVAL_S = 1000.0
    real, count = journal.Journal.add, itertools.count(1)

    def add(self: journal.Journal, name: str, digests: TensorDigests) -> None:
        real(self, name, digests)
        if next(count) % num_tensors == 0:
            self._commit()

    journal.Journal.add = add  # type: ignore[method-assign]


def hurriedly(seconds: float) -> None:
    """In a child: small and slow reads, so that there are many moments to die at, and a journal written often."""
    pool.CHUNK_NBYTES, pool.WRITE_NBYTES = 8192, 4096
    journal.INTERVAL_S = seconds
    real = os.preadv

    def preadv(*args: Any) -> int:
        time.sleep(0.0005)
        return real(*args)

    os.preadv = preadv


class _Unsynced:
    """What of the files in a folder a power loss would take; kept up by the calls that write and sync."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[int, list[tuple[int, int]]] = {}  # inode -> (offset, bytes) written since the last sync
        self._synced: dict[int, int] = {}  # inode -> length at the last sync

    def note(self, call: str, fd: int, *args: Any) -> None:
        inode = os.fstat(fd).st_ino
        if call == "pwrite":
            self._written.setdefault(inode, []).append((args[1], len(args[0])))
        elif call in ("fsync", "fdatasync"):
            self._written.pop(inode, None)
            self._synced[inode] = os.fstat(fd).st_size

    def lose(self) -> None:
        for path in [path for path in self._folder.rglob("*") if path.is_file()]:
            inode = path.stat().st_ino
            with open(path, "r+b") as file:
                for offset, nbytes in self._written.get(inode, ()):
                    file.seek(offset)
                    file.write(bytes(nbytes))
                file.truncate(self._synced.get(inode, 0))


def _die_at(step: int, unsynced: _Unsynced | None) -> None:
    count, dying = itertools.count(), False

    def tick() -> None:
        nonlocal dying
        if not dying and next(count) == step:
            dying = True
            if unsynced:
                unsynced.lose()
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            tick()

    def ticking(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(fd: int, *args: Any) -> Any:
            tick()
            result = real(fd, *args)
            if unsynced:
                unsynced.note(name, fd, *args)
            return result

        return call

    for name in _CALLS:
        setattr(os, name, ticking(name))
    sys.addaudithook(hook)
