"""What the client's cache has of a repo, looked at without asking anybody.

CACHE/models--org--name/snapshots/COMMIT/NAME  ->  CACHE/models--org--name/blobs/DIGEST
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cache:
    """The part of a cache that is one repo's."""

    folder: Path

    @classmethod
    def of(cls, repo: str, cache: Path) -> Cache:
        """Of `repo`, org/name, in the folder where the client keeps what it fetched."""
        return cls(cache / f"models--{repo.replace('/', '--')}")

    def link(self, commit: str, name: str) -> Path | None:
        """A file of a commit, at whatever length."""
        path = self.folder / "snapshots" / commit / name
        return path if os.path.isfile(path) else None

    def places(self, commit: str, name: str, digest: str) -> list[Path]:
        """Where a file is, at whatever length: that of the commit first, then the same content of any commit."""
        link, blob = self.link(commit, name), self.folder / "blobs" / digest
        return [*([link] if link else []), *([blob] if digest and os.path.isfile(blob) else [])]


def digest_of(path: Path, like: str) -> str:
    """The digest of a file, of the kind that `like` is."""
    digest = hashlib.sha256() if len(like) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def has_length(path: Path, nbytes: int) -> bool:
    """Whether a file is there and as long as that; one of 0 bytes is, however long: its length is not known."""
    try:
        return path.stat().st_size == nbytes or not nbytes
    except OSError:
        return False


def discard(path: Path) -> None:
    """Remove a file of the cache: its link in the snapshot and what the link leads to."""
    while path.is_symlink():
        target = path.parent / os.readlink(path)
        path.unlink(missing_ok=True)
        path = target
    path.unlink(missing_ok=True)
