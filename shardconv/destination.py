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
import re
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from .checkpoint import CONFIG_NAME, MANIFEST_NAME, WEIGHTS_STEM
from .errors import HubError, OutputError
from .layout import REPLICATED_FILE

JOURNAL_NAME = "progress.jsonl"  # what a folder under construction says about itself
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_RANK_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")


def set_folder_name(tp: int) -> str:
    """Sets of several degrees stand side by side in one component folder."""
    return f"tp{tp}"


def is_set_file(name: str) -> bool:
    """Whether a file name is one that a set consists of."""
    return name in (MANIFEST_NAME, REPLICATED_FILE) or bool(_RANK_FILE.fullmatch(name))


def is_hidden(name: str) -> bool:
    """Whether a file is one that systems and editors leave beside others (`.DS_Store`, `.nfs0001`, `.x.swp`): it is no
    part of a set, and nobody's fault."""
    return name.startswith(".")


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


def sets_in(component: Path) -> dict[int, Path]:
    """tp degree -> folder of every complete set in a component folder."""
    found = {}
    for entry in os.scandir(component) if component.is_dir() else ():
        degree = entry.name.removeprefix("tp")
        named = degree.isdecimal() and entry.name == set_folder_name(int(degree))
        if named and (component / entry.name / MANIFEST_NAME).is_file():
            found[int(degree)] = component / entry.name
    return dict(sorted(found.items()))


def leftover_nbytes(folder: Path) -> int:
    """Bytes of disk that an unfinished conversion into `folder` has taken and the next one reuses or frees."""
    try:
        return sum(512 * entry.stat().st_blocks for entry in os.scandir(_partial(folder)) if _is_ours(entry.name))
    except OSError:
        return 0


def clear_leftovers(folder: Path) -> None:
    """Remove what processes left that were killed while they replaced the set `folder`, which is the one wanted."""
    _clear(_aside(folder))
    try:
        lock = os.open(_partial(folder), _FOLDER_FLAGS)
    except OSError:
        return
    try:
        if _lock(lock):
            _clear(_partial(folder))
    except BlockingIOError:  # another process is writing there
        pass
    finally:
        os.close(lock)


def check_space(out: Path, nbytes: int) -> list[str]:
    """An issue when the file system of `out` has less than `nbytes` free or cannot be written."""
    existing = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    issues = []
    if not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        issues.append(f"{existing}: cannot be written; choose a folder you may write to")
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        issues.append(
            f"{existing}: the set takes {nbytes:,} bytes, {free:,} are free; make room or choose another disk"
        )
    return issues


class PartialFolder:
    """A folder under construction. Use as a context manager: left without `publish`, it removes what it wrote.

    Raises `OutputError` when another process is writing the same folder or the target refuses.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = _partial(folder)
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
                locked = _lock(lock)
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
            _clear(replaced)
        else:
            try:
                os.rename(self._partial, self._folder)
            except OSError as error:
                raise OutputError(f"{self._folder}: appeared meanwhile ({error.strerror}); look at it") from None
            self._published = True
            _clear(_aside(self._folder))
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
        if error.errno in (errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    return True


def remove_folders(folders: Iterable[Path]) -> None:
    """Those that are empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise


def _partial(folder: Path) -> Path:
    """Where `folder` is written before it gets its name."""
    return folder.with_name(f".{folder.name}.partial")


def _aside(folder: Path) -> Path:
    """Where `folder` goes while another one takes its place on a system that cannot exchange two."""
    return folder.with_name(f".{folder.name}.shardconv-old")


def _is_ours(name: str) -> bool:
    return is_set_file(name) or name in (CONFIG_NAME, JOURNAL_NAME) or name.startswith(WEIGHTS_STEM)


def _remove_our_files(folder: Path, kept: Iterable[str] = ()) -> bool:
    """All but `kept`; first those that say of the others that they are complete. Whether there were any."""
    names = [entry.name for entry in os.scandir(folder) if _is_ours(entry.name) and entry.name not in kept]
    for name in sorted(names, key=lambda name: name not in (MANIFEST_NAME, JOURNAL_NAME)):
        (folder / name).unlink(missing_ok=True)
    return bool(names)


def _clear(folder: Path) -> None:
    """Remove a folder of ours if it is there; what is not ours stays, and the folder with it."""
    if folder.is_dir() and not folder.is_symlink():
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
    _clear(_aside(old))
    os.rename(old, _aside(old))
    os.rename(new, old)
    return _aside(old)


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
    issues = []
    for name in names:
        target = out / name
        if target.exists() and not (target.samefile(source / name) or _same_bytes(target, source / name)):
            issues.append(f"{target}: differs from {source / name}; move it away or name another OUT")
    return issues


def link_files(source: Path, out: Path, names: Iterable[str]) -> None:
    """Hard-link (across file systems: copy) files, given relative to `source`, into `out`, where they are not yet.

    Links in a Hub cache are followed, so that `out` holds files. Raises `OutputError` when the target refuses.
    """
    for name in names:
        real, target = (source / name).resolve(), out / name
        if target.exists():
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(real, target)
            except OSError:  # another file system, or one without hard links; a real fault shows in copying too
                _copy(real, target)
        except OSError as error:
            raise OutputError(f"{target}: cannot be written ({error.strerror}); choose another OUT") from None


def _copy(source: Path, target: Path) -> None:
    """Copy a file so that `target` appears whole or not at all; also when two processes do it at once."""
    temporary = target.with_name(f".{target.name}.shardconv-partial")
    with open(temporary, "ab") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if not target.exists():
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
