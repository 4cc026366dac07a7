"""What forbids writing into a folder; looked at before work starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..format.names import CONFIG_NAME, WEIGHTS_STEMS, is_hidden, is_set_file, set_folder_name
from .links import is_same


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
    weights = [name for name in names if name.startswith(WEIGHTS_STEMS)]
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
            nbytes += 0 if is_same(target, real) else real.stat().st_size
        elif real.stat().st_dev != device or _is_protected(real):
            nbytes += real.stat().st_size
    return nbytes


def _is_protected(path: Path) -> bool:
    """Whether the system refuses a hard link to it (fs.protected_hardlinks): somebody else's, and not ours to write."""
    return os.geteuid() not in (0, path.stat().st_uid) and not os.access(path, os.R_OK | os.W_OK)


def check_links(source: Path, out: Path, names: Iterable[str]) -> list[str]:
    """Issues that forbid bringing the files `names` of `source` into `out`: a different file stands there."""
    return [
        f"{out / name}: differs from {source / name}; move it away or name another OUT, or add --overwrite"
        for name in names
        if (out / name).exists() and not is_same(out / name, source / name)
    ]
