"""What an earlier run left: told from what is not ours, and removed."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..format.names import (
    CONFIG_NAME,
    JOURNAL_NAME,
    MANIFEST_NAME,
    WEIGHTS_STEMS,
    aside_folder,
    is_hidden,
    is_set_file,
    partial_folder,
)
from ..system.linux import FOLDER_FLAGS, lock_folder, locks_are_real, remove_folders


def leftover_nbytes(folder: Path) -> int:
    """Bytes of disk that an unfinished conversion into `folder` has taken and the next one reuses or frees."""
    try:
        return sum(512 * entry.stat().st_blocks for entry in os.scandir(partial_folder(folder)) if is_ours(entry.name))
    except OSError:
        return 0


def clear_leftovers(folder: Path) -> None:
    """Remove what processes left that were killed while they replaced the set `folder`, which is the one wanted."""
    clear(aside_folder(folder), folder)
    with claimed(partial_folder(folder)) as is_ours:
        if is_ours:
            clear(partial_folder(folder), folder)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether `folder` is there and no other process works in it, as far as locks can tell; none does until left."""
    try:
        fd = os.open(folder, FOLDER_FLAGS)
    except OSError:
        yield False
        return
    try:
        try:
            is_ours = lock_folder(fd) and locks_are_real(folder)
        except BlockingIOError:
            is_ours = False
        yield is_ours
    finally:
        os.close(fd)


def is_ours(name: str) -> bool:
    return is_set_file(name) or name in (CONFIG_NAME, JOURNAL_NAME) or name.startswith(WEIGHTS_STEMS)


def remove_our_files(folder: Path, kept: Iterable[str] = ()) -> bool:
    """All but `kept`; first those that say of the others that they are complete. Whether there were any."""
    names = [entry.name for entry in os.scandir(folder) if is_ours(entry.name) and entry.name not in kept]
    for name in sorted(names, key=lambda name: name not in (MANIFEST_NAME, JOURNAL_NAME)):
        (folder / name).unlink(missing_ok=True)
    return bool(names)


def clear(folder: Path, heir: Path) -> None:
    """Remove a folder of ours if it is there. Hidden files in it go to the set `heir`; what else is not ours stays, and
    the folder with it."""
    if folder.is_dir() and not folder.is_symlink():
        for name in [entry.name for entry in os.scandir(folder) if is_hidden(entry.name)]:
            if not os.path.lexists(heir / name):
                with contextlib.suppress(OSError):
                    os.rename(folder / name, heir / name)
        remove_our_files(folder)
        remove_folders([folder])


def exchange(new: Path, old: Path) -> Path:
    """Swap two folders in one step where the system can (Linux renameat2), else move the old one aside first. Returns
    where the old one is now."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, rename_exchange = -100, 2
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is not None and renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(old), rename_exchange) == 0:
        return new
    clear(aside_folder(old), old)
    os.rename(old, aside_folder(old))
    os.rename(new, old)
    return aside_folder(old)
