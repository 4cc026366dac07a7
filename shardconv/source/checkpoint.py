"""What a diffusers component folder holds: config, weight files, tensors. Headers are read, never weights.

The index is the only authority on which files belong to the checkpoint; files beside it are ignored with one warning.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..format.config import read_config
from ..format.header import FileHeader, TensorEntry
from ..format.names import MANIFEST_NAME, PICKLE_SUFFIXES
from ..format.weights import Selection, read_index, select_files, shorten
from ..libraries.choose import library_for
from ..system.links import names_in, strange_link
from .refusals import no_weights, refusals_of


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One selected weight file with its header."""

    name: str
    path: Path
    header: FileHeader


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor and the file that holds it."""

    entry: TensorEntry
    file: SourceFile


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A component folder as `from_pretrained` would take it."""

    folder: Path
    config: Mapping[str, Any]
    config_bytes: bytes  # config.json as it stands
    variant: str | None  # of the files taken; None when the folder has only the default ones
    files: tuple[SourceFile, ...]
    tensors: Mapping[str, SourceTensor]  # in source order: by file name, then by position in the file
    warnings: tuple[str, ...]

    @property
    def class_name(self) -> str:
        return str(self.config["_class_name"])


def _is_converted(folder: Path, names: Sequence[str]) -> bool:
    return MANIFEST_NAME in names or any((folder / name / MANIFEST_NAME).is_file() for name in names)


def open_checkpoint(folder: Path, variant: str | None = None, elsewhere: Iterable[str] = ()) -> Checkpoint:
    """Read config, index and headers of a component folder; every fault found is in one `CheckpointError`.

    `elsewhere`: names of files that the component has where it comes from, fetched or not.
    """
    names = names_in(folder)
    if _is_converted(folder, names):
        raise CheckpointError(
            f"{folder}: a converted set; convert its source, or get the ordinary checkpoint back with: shardconv merge"
        )
    config, config_bytes = read_config(folder)
    library = library_for(config)
    selection = select_files(names, variant, library.weight_stem, library.prefers_single)
    if selection is None:
        step = "choose another revision or repo" if elsewhere else "fetch them"
        raise CheckpointError(no_weights(folder, sorted({*names, *elsewhere}), variant, step, library.weight_stem))
    if selection.index:
        listed = read_index(folder / selection.index)
        file_names = sorted(set(listed.values()))
    else:
        listed, file_names = {}, [str(selection.single)]
    files = _open_files(folder, file_names, listed)
    tensors, issues = _collect(files, listed, selection.index)
    issues += refusals_of(tensors)
    if issues:
        raise CheckpointError(*issues)
    warnings = _warnings(folder, names, selection, file_names, variant)
    return Checkpoint(folder, config, config_bytes, selection.variant, files, tensors, warnings)


def _open_files(folder: Path, names: Sequence[str], listed: Mapping[str, str]) -> tuple[SourceFile, ...]:
    files, issues = [], []
    for name in names:
        path = folder / name
        if not os.path.exists(path):  # unlike Path.exists, also for a name that no file can have
            first = next((tensor for tensor, file in listed.items() if file == name), "")
            issues.append(f"{name}: named by the index (for {first} and others), absent from {folder}; fetch it")
            continue
        outside = strange_link(path)
        if outside:
            issues.append(f"{name}: a link that leads out of its folder, to {outside}; put the file itself there")
            continue
        try:
            files.append(SourceFile(name, path, FileHeader.read(path)))
        except CheckpointError as error:
            issues.extend(error.issues)
        except OSError as error:
            issues.append(f"{path}: cannot be read ({error.strerror})")
    if issues:
        raise CheckpointError(*issues)
    return tuple(files)


def _collect(
    files: Sequence[SourceFile], listed: Mapping[str, str], index: str | None
) -> tuple[dict[str, SourceTensor], list[str]]:
    """Tensors by name in source order, and every contradiction between index and files."""
    tensors: dict[str, SourceTensor] = {}
    issues: list[str] = []
    for file in files:
        for entry in file.header.tensors:
            if entry.name in tensors:
                other = tensors[entry.name].file.name
                issues.append(f"{entry.name}: stands in {other} and in {file.name}; remove the one that is stale")
            elif index and entry.name not in listed:
                issues.append(f"{entry.name}: stands in {file.name} but is not in {index}; the index is incomplete")
            else:
                tensors[entry.name] = SourceTensor(entry, file)
    for name, file_name in listed.items():
        held = tensors.get(name)
        if held is None:
            issues.append(f"{name}: {index} says {file_name}, which lacks it; the file is of another revision")
        elif held.file.name != file_name:
            issues.append(f"{name}: {index} says {file_name}, found in {held.file.name}; the set is mixed")
    return tensors, issues


def _warnings(
    folder: Path, names: Sequence[str], selection: Selection, file_names: Sequence[str], variant: str | None
) -> tuple[str, ...]:
    said = []
    if variant and selection.variant is None:
        said.append(f"{folder}: no files of variant {variant!r}, the default ones are taken")
    suffixes = (".safetensors", *PICKLE_SUFFIXES)
    extra = [name for name in names if name.endswith(suffixes) and name not in file_names]
    if extra:
        taken = selection.index or selection.single
        said.append(f"{folder}: {taken} decides; ignored beside it: {shorten(extra)}")
    return tuple(said)
