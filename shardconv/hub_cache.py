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

    repo: str
    folder: str | None  # None: the client's own

    def link(self, commit: str, name: str) -> Path | None:
        """A file of a commit, at whatever length."""
        import huggingface_hub

        path = huggingface_hub.try_to_load_from_cache(self.repo, name, revision=commit, cache_dir=self.folder)
        return Path(path) if isinstance(path, str) else None

    def places(self, commit: str, name: str, digest: str) -> list[Path]:
        """Where a file is, at whatever length: that of the commit first, then the same content of any commit."""
        link = self.link(commit, name)
        blob = cache_folder(self.folder) / f"models--{self.repo.replace('/', '--')}" / "blobs" / digest
        found = [*([link] if link else []), *([blob] if digest else [])]
        return [path for path in found if os.path.exists(path)]


def cache_folder(cache_dir: str | None) -> Path:
    """Where the client keeps what it fetched."""
    from huggingface_hub import constants

    return Path(cache_dir or constants.HF_HUB_CACHE).expanduser()


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
