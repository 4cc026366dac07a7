"""Which links of a clone git brought, and which somebody made in it later: read from git's index, versions 2 to 4.

git itself is not asked: it may be missing, and it does what the configuration of a clone tells it.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

_MODE_AT = 24  # in an entry
_DIGEST_AT = 40
_LINK = 0o12  # the highest bits of the mode
_EXTENDED = 0x4000  # flag of an entry that has two more bytes of flags


def tracked_links(root: Path) -> frozenset[str] | None:
    """Names, relative to the work tree `root`, that git keeps as links; None when that cannot be told."""
    try:
        folder = _git_folder(root)
        status = (folder / "index").stat()
        return _read(folder, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError, IndexError):
        return None


def _git_folder(root: Path) -> Path:
    """`.git`, or where a file of that name says it is: in submodules and further work trees."""
    place = root / ".git"
    if place.is_dir():
        return place
    return root / place.read_text().removeprefix("gitdir:").strip()


@functools.lru_cache(maxsize=8)
def _read(folder: Path, changed_ns: int, nbytes: int) -> frozenset[str] | None:
    """Links in the index of `folder`, which was `changed_ns`, with so many bytes, when it was last looked at."""
    data = (folder / "index").read_bytes()
    version, count = (int.from_bytes(data[at : at + 4], "big") for at in (4, 8))
    if data[:4] != b"DIRC" or version not in (2, 3, 4):
        return None
    flags_at = _DIGEST_AT + (32 if _is_sha256(folder) else 20)
    links = set()
    name, position = b"", 12
    for _ in range(count):
        flags = int.from_bytes(data[position + flags_at : position + flags_at + 2], "big")
        start = position + flags_at + (4 if flags & _EXTENDED else 2)
        kept = 0
        if version == 4:  # how many bytes of the name before it does not share, then the rest
            cut, start = _varint(data, start)
            kept = len(name) - cut
        end = data.index(0, start)
        name = name[:kept] + data[start:end]
        if int.from_bytes(data[position + _MODE_AT : position + _MODE_AT + 4], "big") >> 12 == _LINK:
            links.add(os.fsdecode(name))
        position = end + 1 if version == 4 else position + ((end - position) // 8 + 1) * 8
    return None if data[position : position + 4] == b"link" else frozenset(links)  # "link": the rest is in another file


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """(number, position after it), as git writes offsets."""
    value = data[position] & 127
    while data[position] & 128:
        position += 1
        value = ((value + 1) << 7) | (data[position] & 127)
    return value, position + 1


def _is_sha256(folder: Path) -> bool:
    """Whether the repo names its objects by sha256."""
    shared = folder / "commondir"  # of further work trees: where the configuration is
    config = (folder / shared.read_text().strip() if shared.is_file() else folder) / "config"
    return config.is_file() and bool(
        re.search(r"(?im)^\s*objectformat\s*=\s*sha256", config.read_text(errors="replace"))
    )
