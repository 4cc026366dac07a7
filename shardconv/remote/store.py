"""What must be known of a remote: its files at one commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..format.names import MANIFEST_NAME, degree_of


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repo at one commit."""

    name: str  # path in the repo
    nbytes: int  # 0 also where a mirror does not tell
    digest: str  # sha256 of a large file, git's sha1 of a small one, hex; "" when only the cache was asked


@dataclass(frozen=True, slots=True)
class Listing:
    """A repo at one commit."""

    commit: str
    files: Mapping[str, RemoteFile]
    gated: str | None = ""  # "auto", "manual", or "" when it is not; None: not told
    private: bool = False

    @property
    def short_commit(self) -> str:
        """The commit, as people write it."""
        return self.commit[:7]

    def digest(self, name: str) -> str:
        """Of a file; "" when it is not known."""
        return self.files[name].digest if name in self.files else ""

    def nbytes(self, name: str) -> int:
        """Of a file; 0 when it is not known."""
        return self.files[name].nbytes if self.digest(name) else 0


def degrees_in(listing: Listing, component: str) -> dict[int, str]:
    """tp degree -> folder of the sets of a component ("" for the root) in a repo."""
    folders = [name.removesuffix(f"/{MANIFEST_NAME}") for name in listing.files if name.endswith(f"/{MANIFEST_NAME}")]
    parts = [folder.rpartition("/") for folder in folders]
    return dict(sorted((degree, f"{place}/{name}".lstrip("/")) for place, _, name in parts
                       if place == component and (degree := degree_of(name))))  # fmt: skip
