"""Does a rank's part of a set fit together, and with the model? Headers only; every fault in one error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardconv import models
from shardconv.checkpoint import leads_out, read_config
from shardconv.engine import CHUNK_NBYTES
from shardconv.errors import CheckpointError, PlanError, SetError, ShardconvError
from shardconv.header import FileHeader
from shardconv.layout import FileLayout, file_header
from shardconv.manifest import Manifest
from shardconv.resolve import Resolution, resolve


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file that this rank reads, its header checked."""

    path: Path
    header: FileHeader


@dataclass(frozen=True, slots=True)
class OpenSet:
    """One rank's view of a set."""

    folder: Path
    manifest: Manifest
    config: Mapping[str, Any]
    files: tuple[RankFile, ...]


def open_set(folder: Path, rank: int, size: int) -> OpenSet:
    """Check manifest, config and headers of what `rank` of `size` needs. Raises `SetError` with every fault."""
    manifest = Manifest.read(folder)
    if manifest.tp_degree != size:
        raise SetError(f"{folder}: converted for tp degree {manifest.tp_degree}, this group has {size} ranks")
    config, _ = read_config(folder.parent)
    issues: list[str] = []
    if config["_class_name"] != manifest.model_class:
        issues.append(
            f"{folder.parent / 'config.json'}: expected a {manifest.model_class}, found a {config['_class_name']}; "
            "the config is of another model"
        )
    files = []
    for layout, record in zip(manifest.layout().files, manifest.files, strict=True):
        if layout.rank not in (None, rank):
            continue
        path = folder / layout.name
        try:
            header = _check_file(path, layout, record.header_digest, manifest)
            files.append(RankFile(path, header))
        except ShardconvError as error:
            issues.extend(error.issues)
        except OSError as error:
            issues.append(f"{path}: cannot be read ({error.strerror}); fetch or convert again")
    if issues:
        raise SetError(*issues)
    return OpenSet(folder, manifest, config, tuple(files))


def _check_file(path: Path, layout: FileLayout, header_digest: str, manifest: Manifest) -> FileHeader:
    outside = leads_out(path, path.parent)
    if outside:
        raise SetError(f"{path.name}: a link that leads out of its folder, to {outside}; put the file itself there")
    header = FileHeader.read(path)
    about = _about(path, header)
    for key, expected in (
        ("format_version", 1), ("tp_degree", manifest.tp_degree), ("rank", layout.rank),
        ("conversion_id", manifest.conversion_id),
    ):  # fmt: skip
        if about.get(key) != expected:
            raise SetError(
                f"{path.name}: says {key} {about.get(key)}, expected {expected}; the file is of another conversion or "
                "rank, fetch or convert the set again"
            )
    expected_header = file_header(layout, manifest.conversion_id, manifest.tp_degree)
    if header.digest != header_digest or header.digest != xxhash.xxh3_128_hexdigest(expected_header):
        raise SetError(f"{path.name}: its header is not the one the manifest describes; fetch or convert the set again")
    return header


def _about(path: Path, header: FileHeader) -> dict[str, Any]:
    try:
        about = json.loads(header.metadata["shardconv"])
    except (KeyError, ValueError):
        about = None
    if not isinstance(about, dict):
        raise SetError(f"{path.name}: not a file of a converted set; fetch or convert the set again")
    return about


def check_model(opened: OpenSet, model: Any) -> Resolution:
    """The manifest against the model that this diffusers builds from the config. Raises `SetError`, every fault.

    A class may have changed between the version that converted and the one that loads; then the shapes, the plan or the
    way it resolves differ, and nothing is loaded.
    """
    manifest = opened.manifest
    expected = models.stored_tensors(model)
    stored = {tensor.name: tensor for tensor in manifest.tensors}
    issues = [
        f"{name}: the model has it, the set does not; convert again with this diffusers"
        for name in expected
        if name not in stored and name not in manifest.aliases
    ]
    issues += [f"{name}: the set has it, the model does not" for name in stored if name not in expected]
    issues += [
        f"{name}: the model's shape is {list(expected[name])}, the set's {list(tensor.shape)}; convert again"
        for name, tensor in stored.items()
        if name in expected and expected[name] != tensor.shape
    ]
    try:
        resolution = resolve(model, manifest.plan, manifest.tp_degree)
    except PlanError as error:
        raise SetError(*issues, *error.issues) from None
    issues += [
        f"{name}: the set cuts it as {tensor.style} {tensor.cut}, this diffusers' model wants "
        f"{resolution.cuts.get(name)}; convert again"
        for name, tensor in stored.items()
        if resolution.cuts.get(name, (None, None))[1] != tensor.cut
    ]
    if issues:
        raise SetError(*issues)
    return resolution


def check_digests(opened: OpenSet, rank: int) -> None:
    """Hash every slice of this rank's files against the manifest. Raises `SetError`, every damaged tensor named."""
    issues = []
    for file in opened.files:
        with open(file.path, "rb", buffering=0) as raw:
            raw.seek(file.header.data_start)
            for entry in file.header.tensors:
                digest = xxhash.xxh3_128()
                left = entry.nbytes
                while left:
                    data = raw.read(min(left, CHUNK_NBYTES))
                    if not data:
                        raise CheckpointError(f"{file.path.name}: the file became shorter while it was read")
                    digest.update(data)
                    left -= len(data)
                known = opened.manifest.digests[entry.name]
                if digest.hexdigest() != known[rank if len(known) > 1 else 0]:
                    issues.append(f"{file.path.name}: {entry.name} is damaged (its digest differs); fetch it again")
    if issues:
        raise SetError(*issues)
