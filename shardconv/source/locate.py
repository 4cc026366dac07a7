"""Where a source's files are: a folder or a Hub repo, the components to shard, and whatever else a pipeline has."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, Interrupted, PlanError, UsageError
from ..format.config import read_config
from ..format.names import CONFIG_NAME, MODEL_INDEX, WEIGHTS_STEM
from ..format.pipeline import pipeline_components
from ..libraries import diffusers as models
from ..plans.planner import Planner
from ..system.jsonfile import parse, read_bounded
from ..system.pagecache import is_cached
from .checkpoint import refuse_file

if TYPE_CHECKING:
    from .fetch import Snapshot


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
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise CheckpointError(f"{name}: no such folder; give a diffusers folder or a Hub repo id such as org/name")
    from ..remote.hub import Repo
    from .fetch import fetch

    repo = Repo(name, subject=f"{name}: not a folder here, and the Hub says")
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


def components(located: Located, subfolder: str | None, has_own_plan: bool, planner: Planner) -> list[str]:
    """Names of the component folders to shard; "" for the source folder itself."""
    if subfolder is not None:
        if not (located.folder / subfolder).is_dir():
            raise CheckpointError(f"{located.folder}: no folder {subfolder!r} in it; check --subfolder")
        return [Path(subfolder).as_posix()]
    if not located.is_pipeline:
        return [""]
    if has_own_plan:
        raise UsageError("--plan: names modules of one model, the source is a pipeline; add --subfolder COMPONENT")
    listed = pipeline_components(located.folder)
    absent = [str(located.folder / name) for name in listed if not (located.folder / name).is_dir()]
    if absent:
        step = "tell its owner" if located.snapshot else "fetch it"
        raise CheckpointError(f"{located.folder}: {MODEL_INDEX} names {', '.join(absent)}, no such folder; {step}")
    planned = {
        name: planner.has_plan(library, cls, _config(located.folder / name)) for name, (library, cls) in listed.items()
    }
    for name, (library, cls) in listed.items():
        config = located.folder / name / CONFIG_NAME
        if planned[name] is None and library == "diffusers" and name.startswith("transformer") and config.is_file():
            models.model_class(cls, read_config(config.parent)[0])  # raises
    chosen = [name for name in listed if planned[name]]
    if not chosen:
        classes = ", ".join(f"{name} ({cls})" for name, (_, cls) in listed.items())
        raise PlanError(
            f"{located.folder}: no component has a class with a _tp_plan, found {classes or 'none'}; give a plan with "
            "--subfolder COMPONENT --plan FILE"
        )
    return chosen


def _config(folder: Path) -> dict[str, Any]:
    """What a component's config says; nothing where there is none, or one that others report."""
    try:
        config = parse(read_bounded(folder / CONFIG_NAME), unique=False)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
