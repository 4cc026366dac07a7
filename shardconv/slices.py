"""A set as the source of something else: where its slices stand, and whether they were what its manifest says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .engine import Extent, RouteDigests
from .errors import SetError
from .manifest import Manifest
from .sets import SetFile


def slices_of(manifest: Manifest, files: Sequence[SetFile]) -> dict[str, list[Extent]]:
    """The slices of every tensor, one a rank; of a whole tensor one, the first where each rank's file has a copy.

    `files` are those of all ranks, by rank.
    """
    slices: dict[str, list[Extent]] = {tensor.name: [] for tensor in manifest.tensors}
    whole = {tensor.name for tensor in manifest.tensors if tensor.cut is None}
    for file in files:
        for entry in file.header.tensors:
            if entry.name not in whole or not slices[entry.name]:
                slices[entry.name].append(Extent(file.path, file.header.data_start + entry.start, entry.nbytes))
    return slices


def check_digests(manifest: Manifest, found: Mapping[str, RouteDigests]) -> None:
    """Raises `SetError` naming every slice that was read and is not what the manifest says."""
    issues = [
        f"{name}: slice {position} of {len(known)} is damaged (its digest differs); fetch the set again"
        for name, known in manifest.digests.items()
        for position, (expected, digest) in enumerate(zip(known, found[name].read, strict=True))
        if expected != digest
    ]
    if issues:
        raise SetError(*issues)
