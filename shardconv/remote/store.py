"""What must be known of a remote: its files at one commit, and the ways to get at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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


class Store(Protocol):
    """A place of files that are fetched into a cache on this disk. Every fault is a `HubError` that says what to do.

    `tests/helpers/store_contract.py` has what every store promises.
    """

    @property
    def name(self) -> str:
        """As people write it."""

    @property
    def offline(self) -> bool:
        """Whether only the cache may be asked."""

    @property
    def cache_folder(self) -> Path:
        """Where fetched files are kept."""

    def listing(self, revision: str | None) -> Listing:
        """What there is at `revision` (None: the newest); offline what the cache has of it."""

    def pin(self, revision: str | None, names: Sequence[str], *, force: bool = False) -> Listing:
        """As `listing`, and the cache remembers which commit `revision` was, so that it can be found offline."""

    def fetch(
        self, listing: Listing, names: Iterable[str], *, force: bool = False, heed: Callable[[], None] = lambda: None
    ) -> Path:
        """Bring files into the cache, unless they are there, and compare what arrives with its digest; the folder that
        has them under their names. `heed` is asked meanwhile, and raises when nobody wants them any more."""

    def cached(self, listing: Listing, name: str) -> Path | None:
        """Where the cache has a file at its full length."""

    def not_cached(self, listing: Listing, name: str) -> str:
        """The sentence for a file that is missing, offline."""

    def download(self, listing: Listing, name: str, folder: Path) -> Path:
        """Bring a file to `folder`, not into the cache; compared as by `fetch`."""

    def read_start(self, listing: Listing, name: str, nbytes: int) -> bytes:
        """The first `nbytes` of a file; nothing is kept."""


def degrees_in(listing: Listing, component: str) -> dict[int, str]:
    """tp degree -> folder of the sets of a component ("" for the root) in a repo."""
    folders = [name.removesuffix(f"/{MANIFEST_NAME}") for name in listing.files if name.endswith(f"/{MANIFEST_NAME}")]
    parts = [folder.rpartition("/") for folder in folders]
    return dict(sorted((degree, f"{place}/{name}".lstrip("/")) for place, _, name in parts
                       if place == component and (degree := degree_of(name))))  # fmt: skip
