"""Where a source's files are: a folder or a Hub repo, the components to shard, and whatever else a pipeline has."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError, Interrupted, UsageError
from ..format.names import MODEL_INDEX, WEIGHTS_STEM
from ..format.pipeline import pipeline_components
from ..remote.choose import is_store_name
from ..system.pagecache import is_cached
from .refusals import refuse_file

if TYPE_CHECKING:
    from ..remote.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Located:
    """A source on this disk."""

    folder: Path
    repo: str | None
    commit: str | None
    snapshot: Snapshot | None = None  # of the repo

    def speaking(self, component: str = "", out: Path | None = None) -> AbstractContextManager[None]:
        """See `Snapshot.speaking`; of a folder faults speak anyway."""
        return self.snapshot.speaking(component, out) if self.snapshot else nullcontext()

    @property
    def is_pipeline(self) -> bool:
        return (self.folder / MODEL_INDEX).is_file()

    def names(self, subfolder: str | None) -> list[str]:
        """Names of the files of the source, of one component or of all, whether they are here or not."""
        places = [subfolder] if subfolder else ["", *(pipeline_components(self.folder) if self.is_pipeline else ())]
        if self.snapshot:
            return [name for place in places for name in self.snapshot.names_in(place)]
        folders = [self.folder / place for place in places]
        return [name for folder in folders if folder.is_dir() for name in os.listdir(folder)]


def locate(
    source: str | os.PathLike[str],
    subfolder: str | None,
    revision: str | None,
    variant: str | None,
    headers_only: bool = False,
) -> Located:
    """Find a source, or fetch it; of a repo's weight files only the headers when these will do."""
    path = Path(source)
    if path.exists() and revision is not None:
        raise UsageError(f"--revision: of a Hub repo; {path} is here, a revision cannot be chosen; leave it out")
    if path.is_dir():
        return Located(path, None, None)
    if path.is_file():
        raise refuse_file(path)
    name = os.fspath(source)
    if not is_store_name(name):
        raise CheckpointError(f"{name}: no such folder; give a diffusers folder or a Hub repo id such as org/name")
    from ..remote.choose import store_named
    from .fetch import fetch

    repo = store_named(name, subject=f"{name}: not a folder here, and the Hub says")
    try:
        snapshot = fetch(repo, revision, subfolder, variant, headers_only)
    except CheckpointError as error:
        raise CheckpointError(*(each if name in each else f"{name}: {each}" for each in error.issues)) from None
    except KeyboardInterrupt:
        raise Interrupted(f"what came of {name} stays in the Hub's cache, where the next run goes on") from None
    return Located(snapshot.folder, name, snapshot.listing.commit, snapshot)


def cold_weights(folder: Path, subfolder: str | None) -> list[Path]:
    """Weight files that are probably converted and not in memory: read while torch and diffusers are imported."""
    places = [folder / subfolder] if subfolder else [folder, *folder.glob("transformer*")]
    paths = [path for place in places for path in sorted(place.glob(f"{WEIGHTS_STEM}*.safetensors"))]
    return [path for path in paths if path.is_file() and not is_cached(path)]
