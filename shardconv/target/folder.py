"""The target folder: a set appears in it whole or not at all.

Files are written in a sibling folder (`.tp4.partial`), synced, and the folder is renamed last. What a killed process
left there is continued or removed by the next one. Nothing is ever deleted that this tool did not write.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ..errors import HubError, OutputError, ShardconvError
from ..format.names import JOURNAL_NAME, aside_folder, is_hidden, partial_folder, set_folder_name, unfinished_name
from ..system.linux import (
    FOLDER_FLAGS,
    lock_folder,
    locks_are_real,
    make_folder,
    make_folders,
    remove_folders,
    sync_folder,
    undisturbed,
    write_new,
)
from .leftovers import clear, exchange, is_ours, remove_our_files


@contextlib.contextmanager
def unfinished(out: Path, tp: int, components: Sequence[str], steps: int) -> Iterator[None]:
    """While sets of `components` for `tp` ranks, then the rest of their pipeline, are written into `out`, a file says
    so: what a kill leaves is no pipeline. It stays after an error, unless nothing of this was written. `steps`: how
    many things are to appear; one appears whole by itself, and needs no such file."""
    marker = out / unfinished_name(tp)
    if not components or (steps < 2 and not marker.exists()):
        yield
        return
    made = make_folders(out)
    try:
        marker.touch()
        sync_folder(out)
    except OSError as error:
        raise OutputError(f"{marker}: cannot be written ({error.strerror}); choose another OUT") from None
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if is_done or not any((out / name / set_folder_name(tp)).exists() for name in components):
            marker.unlink(missing_ok=True)
            remove_folders(made)


class PartialFolder:
    """A folder under construction. Use as a context manager: left without `publish`, it removes what it wrote.

    Raises `OutputError` when another process is writing the same folder or the target refuses; an `OSError` in its
    block is a fault of the target, and becomes one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = partial_folder(folder)
        self._made_folders = make_folders(folder.parent)
        self._lock = self._claim()
        self._fds: list[int] = []
        self._names: list[str] = []  # of the files behind `_fds`
        self._beside: dict[Path, bytes] = {}  # files to be written outside the folder
        self._written: list[Path] = []  # those that are
        self._published = False

    def _claim(self) -> int:
        """Make the folder ours: a descriptor of it, locked. One left by a killed process is taken over as it is."""
        lock = -1
        try:
            is_new = make_folder(self._partial)
            lock = os.open(self._partial, FOLDER_FLAGS)
            try:
                locked = lock_folder(lock) and locks_are_real(self._partial)
            except BlockingIOError:
                raise OutputError(f"{self._partial}: another process is writing here; wait for it to end") from None
            if not locked and not is_new:
                raise OutputError(
                    f"{self._partial}: another process is writing here, or was killed; if none is, remove this folder"
                )
            if not os.path.samestat(os.fstat(lock), os.stat(self._partial)):
                raise OutputError(f"{self._partial}: another process has just finished here; run again")
            names = sorted(entry.name for entry in os.scandir(self._partial))
            foreign = [name for name in names if not is_ours(name) and not is_hidden(name)]
            if foreign:
                raise OutputError(
                    f"{self._partial / foreign[0]}: not a file of ours; move it away, nothing was touched"
                )
        except BaseException as error:
            if lock >= 0:
                os.close(lock)
            remove_folders(self._made_folders)
            if isinstance(error, OSError) and not isinstance(error, OutputError):
                raise OutputError(
                    f"{self._partial}: cannot be written ({error.strerror}); choose another OUT"
                ) from None
            raise
        return lock

    @property
    def path(self) -> Path:
        """Where the files stand until they are published."""
        return self._partial

    def create(self, files: Mapping[str, int], keep: bool = False) -> list[int]:
        """Create every file (name -> bytes) at its full length, so that a full disk is met now; returns descriptors.

        What a killed process left is removed first. With `keep`, `files` stand there already: these and the journal
        stay as they are.
        """
        if remove_our_files(self._partial, (*files, JOURNAL_NAME) if keep else ()):
            os.fsync(self._lock)  # or a power loss could bring an old journal back to new files
        for name, nbytes in files.items():
            path = self._partial / name
            try:
                flags = os.O_WRONLY | os.O_NOFOLLOW if keep else os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._fds.append(os.open(path, flags, 0o666))
                self._names.append(name)
                if nbytes and not keep:
                    os.posix_fallocate(self._fds[-1], 0, nbytes)
            except OSError as error:
                raise OutputError(
                    f"{path}: {nbytes:,} bytes cannot be set aside ({error.strerror}); make room, or choose another OUT"
                ) from None
        return self._fds

    def write_beside(self, name: str, data: bytes) -> None:
        """Have `publish` write a small file next to the folder unless it is there already."""
        self._beside[self._folder.parent / name] = data

    def publish(self, last: Mapping[str, bytes], overwrite: bool = False) -> None:
        """Make everything durable, write the files `last`, and give the folder its name in one step."""
        for fd, name in zip(self._fds, self._names, strict=True):
            os.fsync(fd)
            if not os.path.samestat(os.fstat(fd), os.stat(self._partial / name)):  # locks that only pretend
                raise OutputError(f"{self._partial / name}: replaced by another process; run again when it has ended")
        for name, data in last.items():
            write_new(self._partial / name, data)
        for path, data in self._beside.items():
            if not path.exists():
                self._move_beside(path, data)
        os.fsync(self._lock)
        with undisturbed():  # a Ctrl-C comes before, when nothing stands, or after, when all does
            self._name(overwrite)

    def _name(self, overwrite: bool) -> None:
        (self._partial / JOURNAL_NAME).unlink(missing_ok=True)  # a kill from here to the next line costs all the work
        if overwrite and self._folder.exists():
            replaced = exchange(self._partial, self._folder)
            self._published = True
            clear(replaced, self._folder)
        else:
            try:
                os.rename(self._partial, self._folder)
            except OSError as error:
                raise OutputError(f"{self._folder}: appeared meanwhile ({error.strerror}); look at it") from None
            self._published = True
            clear(aside_folder(self._folder), self._folder)
        sync_folder(self._folder.parent)

    def _move_beside(self, path: Path, data: bytes) -> None:
        """Write a small file outside the folder whole or not at all."""
        try:
            write_new(self._partial / path.name, data)
            os.replace(self._partial / path.name, path)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another OUT") from None
        self._written.append(path)

    def __enter__(self) -> PartialFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with undisturbed():
            for fd in self._fds:
                os.close(fd)
            if not self._published and not isinstance(error, HubError):  # after a lost connection the next run goes on
                remove_our_files(self._partial)
                for path in self._written:
                    path.unlink(missing_ok=True)
                remove_folders([self._partial, *self._made_folders])
            os.close(self._lock)
        if isinstance(error, OSError) and not isinstance(error, ShardconvError):
            what = "nothing was left behind"
            if self._published:
                what = "it is complete, but may not outlast a power loss; look at the disk, then run shardconv verify"
            raise OutputError(f"{self._folder}: {error.strerror}; {what}") from error
