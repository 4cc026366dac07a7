"""What a conversion or a reshard gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import OutputError
from ..format.manifest import Manifest
from ..format.sets import sets_in
from .prepare import Forecast, Job


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one component."""

    component: str  # "" when the source was the component itself
    folder: Path  # of the set
    manifest: Manifest
    warnings: tuple[str, ...]
    was_there: bool  # the same set stood there already, so nothing was written
    download: Mapping[str, int] | None = None  # of a Hub repo, in a dry run, all components': name -> bytes
    forecast: Forecast | None = None  # of a dry run


def check_siblings(job: Job, manifest: Manifest) -> None:
    """Sets of several degrees under one config.json must come from one source.

    Before the conversion lengths and headers are compared, after it (`manifest` has digests then) every byte.
    """
    for degree, folder in sets_in(job.out).items():
        if degree == manifest.tp_degree:
            continue
        if not Manifest.read(folder).source.same_weights(manifest.source):
            raise OutputError(f"{folder}: was converted from other weights than these; name another OUT")
