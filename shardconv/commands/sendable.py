"""What of an output folder may be sent to the Hub: complete sets, and the files they stand among."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..errors import SetError, ShardconvError, UsageError
from ..format.manifest import Manifest
from ..format.names import CONFIG_NAME, MANIFEST_NAME, MODEL_INDEX, degree_wanted, is_hidden, unfinished_degree
from ..format.pipeline import CARD_STEM, pipeline_files
from ..format.sets import sets_in
from ..system.links import leads_out, link_issues


@dataclass(frozen=True, slots=True)
class SendableSet:
    """A complete set in an output folder."""

    component: str  # "" when the output folder is the component itself
    folder: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """Its folder in the repo."""
        return f"{self.component}/{self.folder.name}".lstrip("/")

    def files(self) -> dict[str, Path]:
        """Name in the repo -> file here, the manifest last."""
        names = [*(file.name for file in self.manifest.files), MANIFEST_NAME]
        return {f"{self.name}/{name}": self.folder / name for name in names}


@dataclass(frozen=True, slots=True)
class Sendable:
    """An output folder, as it would stand in a repo."""

    sets: tuple[SendableSet, ...]
    others: dict[str, Path]  # configs, the other components, licences: name in the repo -> file here


def sendable(out: Path, degrees: Collection[int] | None) -> Sendable:
    """The sets of `out` of these degrees (None: all) and what belongs to them; manifests are read, weights are not.

    Raises `SetError` with every fault: nothing converted, an unfinished conversion, a link that leads out of the
    folder; `UsageError` when a component lacks one of `degrees`.
    """
    if not out.is_dir():
        raise SetError(f"{out}: no such folder; give the folder that shardconv convert wrote")
    components = _components(out)
    issues: list[str] = []
    sets: list[SendableSet] = []
    others: dict[str, Path] = {}
    issues += _unfinished_pipelines(out, degrees)
    for component in components:
        folder = out / component
        issues += _unfinished(folder, degrees)
        found = sets_in(folder)
        missing = sorted(set(degrees or ()) - set(found))
        if missing and found:
            held = ", ".join(map(str, found))
            raise UsageError(f"--degrees: {folder} has no set of tp degree {missing[0]}, found {held}; convert for it")
        for degree, place in found.items():
            if degrees is None or degree in degrees:
                try:
                    sets.append(SendableSet(component, place, Manifest.read(place)))
                except ShardconvError as error:
                    issues += error.issues
        if found:
            others[f"{component}/{CONFIG_NAME}".lstrip("/")] = folder / CONFIG_NAME
    if not sets and not issues:
        raise SetError(f"{out}: no converted set in it; give the folder that shardconv convert wrote")
    beside = (name for name in pipeline_files(out, components) if not name.upper().startswith(CARD_STEM))
    others |= {name: out / name for name in beside}  # the repo's card is `push`'s
    sent = [*others.items(), *(file for each in sets for file in each.files().items())]
    outside = {name: leads_out(path, out) for name, path in sent}
    issues += [f"{name}: a link that leads out of {out}, to {real}; not sent" for name, real in outside.items() if real]
    issues += link_issues((name for name in others if not outside[name]), out)
    if issues:
        raise SetError(*issues)
    return Sendable(tuple(sets), others)


def _components(out: Path) -> list[str]:
    """Folders of `out`, "" for itself, in which something was converted."""
    names = [""] if _holds_sets(out) else []
    inner = [child for child in out.iterdir() if child.is_dir() and not is_hidden(child.name)]
    return names + sorted(child.name for child in inner if _holds_sets(child))


def _holds_sets(folder: Path) -> bool:
    return any(degree_wanted(name) for name in os.listdir(folder)) and not (folder / MANIFEST_NAME).exists()


def _unfinished_pipelines(out: Path, degrees: Collection[int] | None) -> list[str]:
    found = [degree for name in os.listdir(out) if (degree := unfinished_degree(name))]
    return [
        f"{out}: the conversion for tp degree {degree} did not finish; run shardconv convert again, then push"
        for degree in found
        if degrees is None or degree in degrees or not (out / MODEL_INDEX).is_file()
    ]


def _unfinished(component: Path, degrees: Collection[int] | None) -> list[str]:
    complete = sets_in(component)
    return [
        f"{component / name}: an unfinished conversion; run shardconv convert again, then push"
        for name in sorted(os.listdir(component))
        if (degree := degree_wanted(name)) is not None
        and degree not in complete
        and (degrees is None or degree in degrees)
    ]
