"""The target folder: a set appears in it whole or not at all.

Files are written in a sibling folder (`.tp4.partial`), synced, and the folder is renamed last. What a killed process
left there is continued or removed by the next one. Nothing is ever deleted that this tool did not write.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ..errors import HubError, OutputError, ShardconvError
from ..format.names import (
    CONFIG_NAME,
    JOURNAL_NAME,
    MANIFEST_NAME,
    WEIGHTS_STEM,
    aside_folder,
    is_hidden,
    is_set_file,
    partial_folder,
    set_folder_name,
    unfinished_name,
)

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def check_target(out: Path, source: Path, tp: int, config_bytes: bytes) -> list[str]:
    """Issues that forbid writing the set of `source` into the component folder `out`; touches nothing."""
    if out.resolve() == source.resolve():
        return [f"{out}: is the source itself; name another OUT, the source stays as it is"]
    if out.resolve() in source.resolve().parents:
        return [f"{out}: holds the source {source}; name another OUT, best a new folder"]
    return check_component(out, source, tp, config_bytes)


def check_component(out: Path, source: Path, tp: int, config_bytes: bytes) -> list[str]:
    """Issues with what stands in the component folder `out` already, if it is there; touches nothing."""
    if out.exists() and not out.is_dir():
        return [f"{out}: expected a folder to write into, found a file; name another OUT"]
    issues = []
    config = out / CONFIG_NAME
    if config.exists() and config.read_bytes() != config_bytes:
        issues.append(f"{config}: belongs to another model than {source}; name another OUT")
    names = sorted(entry.name for entry in os.scandir(out)) if out.is_dir() else []
    weights = [name for name in names if name.startswith(WEIGHTS_STEM)]
    if weights:
        issues.append(f"{out / weights[0]}: ordinary weights, which a set must not stand beside; name another OUT")
    folder = out / set_folder_name(tp)
    if folder.is_symlink():
        issues.append(f"{folder}: a link; move it away, nothing was touched")
    elif folder.is_dir():
        names = sorted(entry.name for entry in os.scandir(folder))
        foreign = [name for name in names if not is_set_file(name) and not is_hidden(name)]
        if foreign:
            issues.append(f"{folder / foreign[0]}: not a file of a converted set; move it away, nothing was touched")
    elif folder.exists():
        issues.append(f"{folder}: expected a folder, found a file; move it away, nothing was touched")
    return issues


def leftover_nbytes(folder: Path) -> int:
    """Bytes of disk that an unfinished conversion into `folder` has taken and the next one reuses or frees."""
    try:
        return sum(512 * entry.stat().st_blocks for entry in os.scandir(partial_folder(folder)) if _is_ours(entry.name))
    except OSError:
        return 0


def clear_leftovers(folder: Path) -> None:
    """Remove what processes left that were killed while they replaced the set `folder`, which is the one wanted."""
    _clear(aside_folder(folder), folder)
    with claimed(partial_folder(folder)) as is_ours:
        if is_ours:
            _clear(partial_folder(folder), folder)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether `folder` is there and no other process works in it, as far as locks can tell; none does until left."""
    try:
        fd = os.open(folder, _FOLDER_FLAGS)
    except OSError:
        yield False
        return
    try:
        try:
            is_ours = _lock(fd) and _locks_are_real(folder)
        except BlockingIOError:
            is_ours = False
        yield is_ours
    finally:
        os.close(fd)


def check_space(out: Path, nbytes: int, copied: int = 0) -> list[str]:
    """Issues when the file system of `out` cannot be written, or has less free than sets of `nbytes` and `copied` bytes
    of other files take."""
    if not nbytes + copied:
        return []
    existing = _existing(out)
    issues = []
    if not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        issues.append(f"{existing}: cannot be written; choose a folder you may write to")
    free = shutil.disk_usage(existing).free
    if nbytes + copied > free:
        what = f"the set takes {nbytes:,} bytes" + (f", files to be copied beside it {copied:,}" if copied else "")
        issues.append(f"{existing}: {what}, {free:,} are free; make room or choose another disk")
    return issues


def _existing(out: Path) -> Path:
    """`out`, or the nearest folder above it that there is."""
    return next(parent for parent in (out, *out.absolute().parents) if parent.exists())


def copied_nbytes(source: Path, out: Path, names: Iterable[str]) -> int:
    """Bytes of the files `names` of `source` that `link_files` will have to copy into `out`: they are on another file
    system, or somebody else's, as far as that can be known before, or take the place of others."""
    device = _existing(out).stat().st_dev
    nbytes = 0
    for name in names:
        real, target = (source / name).resolve(), out / name
        if target.exists():
            nbytes += 0 if _is_same(target, real) else real.stat().st_size
        elif real.stat().st_dev != device or _is_protected(real):
            nbytes += real.stat().st_size
    return nbytes


def _is_protected(path: Path) -> bool:
    """Whether the system refuses a hard link to it (fs.protected_hardlinks): somebody else's, and not ours to write."""
    return os.geteuid() not in (0, path.stat().st_uid) and not os.access(path, os.R_OK | os.W_OK)


@contextlib.contextmanager
def unfinished(out: Path, tp: int, components: Sequence[str], steps: int) -> Iterator[None]:
    """While sets of `components` for `tp` ranks, then the rest of their pipeline, are written into `out`, a file says
    so: what a kill leaves is no pipeline. It stays after an error, unless nothing of this was written. `steps`: how
    many things are to appear; one appears whole by itself, and needs no such file."""
    marker = out / unfinished_name(tp)
    if not components or (steps < 2 and not marker.exists()):
        yield
        return
    made = _make_folders(out)
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
        self._made_folders = _make_folders(folder.parent)
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
            is_new = _make_folder(self._partial)
            lock = os.open(self._partial, _FOLDER_FLAGS)
            try:
                locked = _lock(lock) and _locks_are_real(self._partial)
            except BlockingIOError:
                raise OutputError(f"{self._partial}: another process is writing here; wait for it to end") from None
            if not locked and not is_new:
                raise OutputError(
                    f"{self._partial}: another process is writing here, or was killed; if none is, remove this folder"
                )
            if not os.path.samestat(os.fstat(lock), os.stat(self._partial)):
                raise OutputError(f"{self._partial}: another process has just finished here; run again")
            names = sorted(entry.name for entry in os.scandir(self._partial))
            foreign = [name for name in names if not _is_ours(name) and not is_hidden(name)]
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
        if _remove_our_files(self._partial, (*files, JOURNAL_NAME) if keep else ()):
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
            _write_new(self._partial / name, data)
        for path, data in self._beside.items():
            if not path.exists():
                self._move_beside(path, data)
        os.fsync(self._lock)
        with _undisturbed():  # a Ctrl-C comes before, when nothing stands, or after, when all does
            self._name(overwrite)

    def _name(self, overwrite: bool) -> None:
        (self._partial / JOURNAL_NAME).unlink(missing_ok=True)  # a kill from here to the next line costs all the work
        if overwrite and self._folder.exists():
            replaced = _exchange(self._partial, self._folder)
            self._published = True
            _clear(replaced, self._folder)
        else:
            try:
                os.rename(self._partial, self._folder)
            except OSError as error:
                raise OutputError(f"{self._folder}: appeared meanwhile ({error.strerror}); look at it") from None
            self._published = True
            _clear(aside_folder(self._folder), self._folder)
        sync_folder(self._folder.parent)

    def _move_beside(self, path: Path, data: bytes) -> None:
        """Write a small file outside the folder whole or not at all."""
        try:
            _write_new(self._partial / path.name, data)
            os.replace(self._partial / path.name, path)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another OUT") from None
        self._written.append(path)

    def __enter__(self) -> PartialFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _undisturbed():
            for fd in self._fds:
                os.close(fd)
            if not self._published and not isinstance(error, HubError):  # after a lost connection the next run goes on
                _remove_our_files(self._partial)
                for path in self._written:
                    path.unlink(missing_ok=True)
                remove_folders([self._partial, *self._made_folders])
            os.close(self._lock)
        if isinstance(error, OSError) and not isinstance(error, ShardconvError):
            what = "nothing was left behind"
            if self._published:
                what = "it is complete, but may not outlast a power loss; look at the disk, then run shardconv verify"
            raise OutputError(f"{self._folder}: {error.strerror}; {what}") from error


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
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


def _make_folders(out: Path) -> list[Path]:
    """Create `out` and its parents; returns what was created, innermost first."""
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be created ({error.strerror}); choose another OUT") from None
    return missing


def _make_folder(folder: Path) -> bool:
    """Whether it had to be made."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _lock(fd: int) -> bool:
    """Lock an open folder. False when this file system has no locks; `BlockingIOError` when another process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    return True


def _locks_are_real(locked: Path) -> bool:
    """Whether a second lock of the folder `locked`, which this process has locked, is refused. On some network file
    systems every lock is granted."""
    fd = os.open(locked, _FOLDER_FLAGS)
    try:
        return not _lock(fd)
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


def _is_ours(name: str) -> bool:
    return is_set_file(name) or name in (CONFIG_NAME, JOURNAL_NAME) or name.startswith(WEIGHTS_STEM)


def _remove_our_files(folder: Path, kept: Iterable[str] = ()) -> bool:
    """All but `kept`; first those that say of the others that they are complete. Whether there were any."""
    names = [entry.name for entry in os.scandir(folder) if _is_ours(entry.name) and entry.name not in kept]
    for name in sorted(names, key=lambda name: name not in (MANIFEST_NAME, JOURNAL_NAME)):
        (folder / name).unlink(missing_ok=True)
    return bool(names)


def _clear(folder: Path, heir: Path) -> None:
    """Remove a folder of ours if it is there. Hidden files in it go to the set `heir`; what else is not ours stays, and
    the folder with it."""
    if folder.is_dir() and not folder.is_symlink():
        for name in [entry.name for entry in os.scandir(folder) if is_hidden(entry.name)]:
            if not os.path.lexists(heir / name):
                with contextlib.suppress(OSError):
                    os.rename(folder / name, heir / name)
        _remove_our_files(folder)
        remove_folders([folder])


def _exchange(new: Path, old: Path) -> Path:
    """Swap two folders in one step where the system can (Linux renameat2), else move the old one aside first. Returns
    where the old one is now."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, rename_exchange = -100, 2
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is not None and renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(old), rename_exchange) == 0:
        return new
    _clear(aside_folder(old), old)
    os.rename(old, aside_folder(old))
    os.rename(new, old)
    return aside_folder(old)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_new(path: Path, data: bytes) -> None:
    """Write a small file, durable, mode by the umask."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def check_links(source: Path, out: Path, names: Iterable[str]) -> list[str]:
    """Issues that forbid bringing the files `names` of `source` into `out`: a different file stands there."""
    return [
        f"{out / name}: differs from {source / name}; move it away or name another OUT, or add --overwrite"
        for name in names
        if (out / name).exists() and not _is_same(out / name, source / name)
    ]


def _is_same(target: Path, source: Path) -> bool:
    return target.samefile(source) or _same_bytes(target, source)


def link_files(source: Path, out: Path, names: Iterable[str], overwrite: bool = False) -> None:
    """Hard-link (across file systems: copy) files, given relative to `source`, into `out`, where they are not yet; with
    `overwrite` also where another file stands.

    Links in a Hub cache are followed, so that `out` holds files. Raises `OutputError` when the target refuses.
    """
    for name in names:
        real, target = (source / name).resolve(), out / name
        if target.exists() and not (overwrite and not _is_same(target, real)):
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _bring(real, target)
        except OSError as error:
            raise OutputError(f"{target}: cannot be written ({error.strerror}); choose another OUT") from None


def _bring(source: Path, target: Path) -> None:
    """Link or copy a file so that `target` appears whole or not at all, also when two processes do it at once."""
    if not target.exists():
        with contextlib.suppress(OSError):  # another file system, or one without hard links
            os.link(source, target)
            return
    temporary = target.with_name(f".{target.name}.shardconv-partial")
    with open(temporary, "ab") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if not (target.exists() and _is_same(target, source)):
                shutil.copyfile(source, temporary)
                os.fsync(file.fileno())
                os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def _same_bytes(a: Path, b: Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with open(a, "rb") as left, open(b, "rb") as right:
        while chunk := left.read(1 << 20):
            if chunk != right.read(1 << 20):
                return False
    return True
