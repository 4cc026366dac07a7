"""The target folder: a set appears in it whole or not at all.

Files are written in a sibling folder (`.tp4.partial`), synced, and the folder is renamed last. Nothing is ever deleted
that this tool did not write.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from .checkpoint import CONFIG_NAME, WEIGHTS_STEM
from .errors import OutputError
from .layout import REPLICATED_FILE, FileLayout
from .manifest import MANIFEST_NAME


def set_folder_name(tp: int) -> str:
    """Sets of several degrees stand side by side in one component folder."""
    return f"tp{tp}"


def is_set_file(name: str) -> bool:
    """Whether a file name is one that a set consists of."""
    return name in (MANIFEST_NAME, REPLICATED_FILE) or (name.startswith("rank-") and name.endswith(".safetensors"))


def check_target(out: Path, source: Path, tp: int, config_bytes: bytes) -> list[str]:
    """Issues that forbid writing the set of `source` into the component folder `out`; touches nothing."""
    if out.exists() and not out.is_dir():
        return [f"{out}: expected a folder to write into, found a file; name another OUT"]
    if out.resolve() == source.resolve():
        return [f"{out}: is the source itself; name another OUT, the source stays as it is"]
    issues = []
    config = out / CONFIG_NAME
    if config.exists() and config.read_bytes() != config_bytes:
        issues.append(f"{config}: belongs to another model than {source}; name another OUT")
    names = sorted(entry.name for entry in os.scandir(out)) if out.is_dir() else []
    weights = [name for name in names if name.startswith(WEIGHTS_STEM)]
    if weights:
        issues.append(f"{out / weights[0]}: ordinary weights, which a set must not stand beside; name another OUT")
    folder = out / set_folder_name(tp)
    if folder.is_dir():
        foreign = sorted(entry.name for entry in os.scandir(folder) if not is_set_file(entry.name))
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


class PartialSet:
    """The set under construction. Use as a context manager: left without `publish`, it removes what it wrote.

    Raises `OutputError` when another process is writing the same set or the target refuses.
    """

    def __init__(self, out: Path, tp: int) -> None:
        self._folder = out / set_folder_name(tp)
        self._partial = out / f".{self._folder.name}.partial"
        self._made_folders = _make_folders(out)
        self._lock = self._claim()
        self.fds: list[int] = []
        self._config: Path | None = None  # config.json, if this conversion wrote it
        self._published = False

    def _claim(self) -> int:
        try:
            self._partial.mkdir(exist_ok=True)
            lock = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise OutputError(f"{self._partial}: cannot be written ({error.strerror}); choose another OUT") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise OutputError(f"{self._partial}: another conversion is writing here; wait for it to end") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.EOPNOTSUPP):
                raise
        _remove_set_files(self._partial)  # of a conversion that was killed
        return lock

    def create(self, files: Sequence[FileLayout]) -> list[int]:
        """Create every file at its full length, so that a full disk is met now. Returns their descriptors."""
        for file in files:
            path = self._partial / file.name
            try:
                self.fds.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
                os.posix_fallocate(self.fds[-1], 0, file.nbytes)
            except OSError as error:
                raise OutputError(
                    f"{path}: {file.nbytes:,} bytes cannot be set aside ({error.strerror}); make room, or choose "
                    "another OUT"
                ) from None
        return self.fds

    def publish(self, manifest_text: str, config_bytes: bytes, overwrite: bool) -> None:
        """Make the files durable, write the manifest, and give the set its name in one step."""
        config = self._folder.parent / CONFIG_NAME
        if not config.exists():
            self._config = config
            write_atomically(config, config_bytes)
        for fd in self.fds:
            os.fsync(fd)
        with open(self._partial / MANIFEST_NAME, "x", encoding="utf-8") as file:
            file.write(manifest_text)
            file.flush()
            os.fsync(file.fileno())
        os.fsync(self._lock)
        if overwrite and self._folder.exists():
            _exchange(self._partial, self._folder)
            self._published = True
            _remove_set_files(self._partial)
            self._partial.rmdir()
        else:
            try:
                os.rename(self._partial, self._folder)
            except OSError as error:
                raise OutputError(f"{self._folder}: appeared while converting ({error.strerror}); look at it") from None
            self._published = True
        sync_folder(self._folder.parent)

    def __enter__(self) -> PartialSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self.fds:
            os.close(fd)
        if not self._published:
            _remove_set_files(self._partial)
            if self._config is not None:
                self._config.unlink(missing_ok=True)
            for folder in (self._partial, *self._made_folders):
                _remove_if_empty(folder)
        os.close(self._lock)


def _make_folders(out: Path) -> list[Path]:
    """Create `out` and its parents; returns what was created, innermost first."""
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be created ({error.strerror}); choose another OUT") from None
    return missing


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _remove_set_files(folder: Path) -> None:
    for entry in list(os.scandir(folder)):
        if is_set_file(entry.name):
            os.unlink(entry.path)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step where the system can (Linux renameat2), else by two renames."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, rename_exchange = -100, 2
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is not None and renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(old), rename_exchange) == 0:
        return
    aside = old.with_name(f".{old.name}.{uuid.uuid4().hex[:8]}.old")
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all, mode by the umask."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another OUT") from None


def link_files(source: Path, out: Path, names: Iterable[str]) -> None:
    """Hard-link (across file systems: copy) files, given relative to `source`, into `out`; equal ones are left alone.

    Links in a Hub cache are followed, so that `out` holds files. Raises `OutputError` when a different file of that
    name is there already.
    """
    for name in names:
        real, target = (source / name).resolve(), out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            if not (target.samefile(real) or _same_bytes(target, real)):
                raise OutputError(f"{target}: differs from {source / name}; move it away or name another OUT")
            continue
        try:
            os.link(real, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise OutputError(f"{target}: cannot be written ({error.strerror}); choose another OUT") from None
            shutil.copyfile(real, target)


def _same_bytes(a: Path, b: Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with open(a, "rb") as left, open(b, "rb") as right:
        while chunk := left.read(1 << 20):
            if chunk != right.read(1 << 20):
                return False
    return True
