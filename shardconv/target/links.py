"""Files that a set's folder takes over unchanged: hard-linked, else copied."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..errors import OutputError


def is_same(target: Path, source: Path) -> bool:
    return target.samefile(source) or _same_bytes(target, source)


def link_files(source: Path, out: Path, names: Iterable[str], overwrite: bool = False) -> None:
    """Hard-link (across file systems: copy) files, given relative to `source`, into `out`, where they are not yet; with
    `overwrite` also where another file stands.

    Links in a Hub cache are followed, so that `out` holds files. Raises `OutputError` when the target refuses.
    """
    for name in names:
        real, target = (source / name).resolve(), out / name
        if target.exists() and not (overwrite and not is_same(target, real)):
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
            if not (target.exists() and is_same(target, source)):
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
