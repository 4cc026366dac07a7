"""Does a rank's part of a set fit together, and with the model? Headers only; every fault in one error."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from shardconv import models
from shardconv.checkpoint import config_digest, read_config
from shardconv.cut import Cut
from shardconv.errors import PlanError, SetError
from shardconv.manifest import Manifest
from shardconv.resolve import Resolution, resolve
from shardconv.sets import SetFile, open_files

HASHED_NBYTES = 16 << 20  # bytes at once, and the host memory of one thread when they come from an accelerator


@dataclass(frozen=True, slots=True)
class OpenSet:
    """One rank's view of a set."""

    folder: Path
    manifest: Manifest
    config: Mapping[str, Any]
    files: tuple[SetFile, ...]


def open_set(folder: Path, rank: int, size: int) -> OpenSet:
    """Check manifest, config and headers of what `rank` of `size` needs. Raises `SetError` with every fault."""
    manifest = Manifest.read(folder)
    if manifest.tp_degree != size:
        raise SetError(
            f"{folder}: converted for tp degree {manifest.tp_degree}, this group has {size} ranks; "
            f"run: shardconv convert --tp {size} SOURCE {folder.parent}"
        )
    component = folder.absolute().parent
    config, _ = read_config(component)
    if config["_class_name"] != manifest.model_class:
        raise SetError(
            f"{component / 'config.json'}: expected a {manifest.model_class}, found a {config['_class_name']}; "
            "the config is of another model"
        )
    if config_digest(config) != manifest.config_digest:
        raise SetError(
            f"{component / 'config.json'}: not the config that was converted; the same weights would compute something "
            "else; put the source's config.json back, or convert again"
        )
    return OpenSet(folder, manifest, config, open_files(folder, manifest, [rank]))


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
        f"{name}: the set has it {_how(tensor.cut)}, this diffusers' model wants it "
        f"{_how(resolution.cuts.get(name, (None, None))[1])}; convert again"
        for name, tensor in stored.items()
        if resolution.cuts.get(name, (None, None))[1] != tensor.cut
    ]
    if issues:
        raise SetError(*issues)
    return resolution


def _how(cut: Cut | None) -> str:
    return "whole" if cut is None else f"cut on dim {cut.dim} in blocks {list(cut.block_sizes)}"


def check_digests(opened: OpenSet, loaded: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Hash the tensors of each file, `loaded` in the order of `opened.files`, against the manifest; on all cores.

    Raises `SetError`, every damaged tensor named.
    """
    slices = [
        (file, name, tensor) for file, each in zip(opened.files, loaded, strict=True) for name, tensor in each.items()
    ]
    with ThreadPoolExecutor(max(2, os.cpu_count() or 1), "loader-verify") as executor:
        digests = list(executor.map(_digest, [tensor for _, _, tensor in slices]))
    issues = []
    for (file, name, _), digest in zip(slices, digests, strict=True):
        known = opened.manifest.digests[name]
        if digest != known[(file.rank or 0) if len(known) > 1 else 0]:
            issues.append(f"{file.path.name}: {name} is damaged (its digest differs); fetch it again")
    if issues:
        raise SetError(*issues)


def _digest(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes; from an accelerator they come back a part at a time."""
    hasher = xxhash.xxh3_128()
    data = tensor.flatten().view(torch.uint8)
    for start in range(0, data.nbytes, HASHED_NBYTES):
        hasher.update(data[start : start + HASHED_NBYTES].cpu().numpy())
    return str(hasher.hexdigest())
