"""What the file system must do for a set to appear whole: locks, syncs, exchanges."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import OutputError

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Finish, or clean up, although somebody presses Ctrl-C. Signals are the main thread's; a handler that was not set
    from Python could not be put back, so it stays."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def make_folders(out: Path) -> list[Path]:
    """Create `out` and its parents; returns what was created, innermost first."""
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be created ({error.strerror}); choose another OUT") from None
    return missing


def make_folder(folder: Path) -> bool:
    """Whether it had to be made."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def lock_folder(fd: int) -> bool:
    """Lock an open folder. False when this file system has no locks; `BlockingIOError` when another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    return True


def locks_are_real(locked: Path) -> bool:
    """Whether a second lock of the folder `locked`, which this process has locked, is refused. On some network file
    systems every lock is granted."""
    fd = os.open(locked, FOLDER_FLAGS)
    try:
        return not lock_folder(fd)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def remove_folders(folders: Iterable[Path]) -> None:
    """Those that are empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_new(path: Path, data: bytes) -> None:
    """Write a small file, durable, mode by the umask."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
