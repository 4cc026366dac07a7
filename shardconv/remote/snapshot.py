"""The files of a remote on this disk, and how faults in them are told."""

from __future__ import annotations

import re
import shutil
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError, ShardconvError
from ..format.names import MODEL_INDEX
from .store import Listing, Store


class Snapshot:
    """A repo's files on this disk, at one commit. `folder` lives as long as this object where nothing was kept."""

    def __init__(self, repo: Store, listing: Listing, folder: Path, names: Collection[str], temporary: bool) -> None:
        self.repo = repo
        self.listing = listing
        self.folder = folder
        self.names = tuple(dict.fromkeys(names))  # in the repo, of all files that a conversion reads
        if temporary:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def missing(self) -> dict[str, int]:
        """Name -> bytes of the files that are not in the cache."""
        names = [name for name in self.names if not self.repo.cached(self.listing, name)]
        return {name: self.listing.files[name].nbytes for name in names}

    def names_in(self, component: str) -> list[str]:
        """Names of all files of the repo that stand directly in a component's folder, fetched or not."""
        prefix = f"{component}/" if component else ""
        names = [name.removeprefix(prefix) for name in self.listing.files if name.startswith(prefix)]
        return sorted(name for name in names if "/" not in name)

    def spoken(self, text: str) -> str:
        """A sentence about places in `folder` as one about the repo at its commit."""
        place = re.compile(rf"{re.escape(str(self.folder))}((?:/[\w.-]*\w)*)")
        return place.sub(rf"{self.repo.name}\1 at {self.listing.short_commit}", text)

    @contextmanager
    def speaking(self, component: str = "", out: Path | None = None) -> Iterator[None]:
        """Faults found within speak of the repo at its commit instead of `folder`; those of the checkpoint, which may
        name a file or a tensor of `component` alone, get repo and commit, if they are not about `out`."""

        def about(issue: str) -> str:
            spoken = self.spoken(issue)
            if self.repo.name in spoken or (out and spoken.startswith(str(out))):
                return spoken
            return f"{'/'.join(filter(None, (self.repo.name, component)))} at {self.listing.short_commit}: {spoken}"

        try:
            yield
        except ShardconvError as error:
            raise error.reworded(about if isinstance(error, CheckpointError) else self.spoken) from None

    def rest(self, sharded: Collection[str]) -> list[str]:
        """Names of the files that do not belong to the components `sharded`; `model_index.json` last."""
        rest = [name for name in self.names if name.rpartition("/")[0].split("/")[0] not in sharded]
        return sorted(rest, key=lambda name: name == MODEL_INDEX)
