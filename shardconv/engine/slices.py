"""Between a set's slices and its manifest: where they stand, whether they are what it says, and the last of writing
them, when all digests are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import xxhash

from ..errors import SetError
from ..format.layout import SetLayout, file_header
from ..format.manifest import FileRecord, Manifest
from ..format.sets import SetFile
from .pool import write_all
from .records import Extent, RouteDigests


def slices_of(manifest: Manifest, files: Sequence[SetFile]) -> dict[str, list[Extent]]:
    """The slices of every tensor, one a rank; of a whole tensor one, the first where each rank's file has a copy.

    `files` are those of all ranks, by rank.
    """
    slices: dict[str, list[Extent]] = {tensor.name: [] for tensor in manifest.tensors}
    whole = {tensor.name for tensor in manifest.tensors if tensor.cut is None}
    for file in files:
        for entry in file.header.tensors:
            if entry.name not in whole or not slices[entry.name]:
                slices[entry.name].append(Extent.of(file.path, file.header.data_start, entry))
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


def write_headers(manifest: Manifest, layout: SetLayout, outputs: Sequence[int]) -> Manifest:
    """Give `manifest`, whose digests are known, its conversion id, and write that with the header into each of the
    layout's files, open as `outputs`. Returns the complete manifest."""
    manifest = replace(manifest, conversion_id=manifest.identity())
    records = []
    for file, fd in zip(layout.files, outputs, strict=True):
        header = file_header(file, manifest.conversion_id, layout.tp)
        write_all(fd, memoryview(header), 0)
        records.append(FileRecord(file.name, file.rank, file.nbytes, xxhash.xxh3_128_hexdigest(header)))
    return replace(manifest, files=tuple(records))
