"""What a diffusers component folder holds: config, weight files, tensors. Headers are read, never weights.

The index is the only authority on which files belong to the checkpoint; files beside it are ignored with one warning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..format.config import read_config
from ..format.header import FileHeader, TensorEntry
from ..format.names import CONFIG_NAME, LORA_FILE, MANIFEST_NAME, PICKLE_SUFFIXES, WEIGHTS_STEM
from ..format.weights import Selection, read_index, select_files, shorten
from ..system.links import names_in, strange_link

_FOREIGN_SUFFIXES = (".gguf", ".msgpack", ".flashpack", ".onnx")
_LORA_KEY = re.compile(r"(^|\.)(lora_[AB]|lora_(up|down)|base_layer|lora)(\.|$)|lora_(up|down)\.weight$")
_ORIGINAL_KEY = re.compile(r"^(double_blocks|single_blocks|joint_blocks|model\.diffusion_model|net\.blocks)\.")
_QUANTIZED_KEY = re.compile(
    r"(\.|_)(scale|scale_inv|scales|scale_weight|input_scale|weight_scale|absmax|quant_map|nested_absmax|zero_point|"
    r"zeros|qweight|qzeros|g_idx|SCB)$|\.quant_state\."
)
_WRAPPERS = ("module.", "_orig_mod.", "model.")


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

    @property
    def offset(self) -> int:
        """Absolute byte offset of the tensor's data in its file."""
        return self.file.header.data_start + self.entry.start


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


def refuse_file(path: Path) -> CheckpointError:
    """The error for a SOURCE that is a file: says what it is and what to give instead."""
    if path.suffix in PICKLE_SUFFIXES:
        return CheckpointError(
            f"{path}: pickled weights are never opened; save them with save_pretrained(..., safe_serialization=True)"
        )
    if path.suffix != ".safetensors":
        return CheckpointError(f"{path}: expected a folder or a Hub repo id, found a file")
    names = [entry.name for entry in FileHeader.read(path).tensors]
    if any(map(_LORA_KEY.search, names)):
        return CheckpointError(f"{path}: holds a LoRA, not a model; fuse it into its base model first (fuse_lora)")
    if any(map(_ORIGINAL_KEY.match, names)):
        return CheckpointError(
            f"{path}: an original-format single file, not diffusers layout; convert it first: "
            "from_single_file(...) then save_pretrained(...)"
        )
    return CheckpointError(f"{path}: expected a component folder with {CONFIG_NAME}, found one file; give its folder")


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
    selection = select_files(names, variant)
    if selection is None:
        step = "choose another revision or repo" if elsewhere else "fetch them"
        raise CheckpointError(_no_weights(folder, sorted({*names, *elsewhere}), variant, step))
    if selection.index:
        listed = read_index(folder / selection.index)
        file_names = sorted(set(listed.values()))
    else:
        listed, file_names = {}, [str(selection.single)]
    files = _open_files(folder, file_names, listed)
    tensors, issues = _collect(files, listed, selection.index)
    issues += _refusals(tensors)
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


def _refusals(tensors: Mapping[str, SourceTensor]) -> list[str]:
    """Checkpoints that can be read but must not be cut, each by name."""
    lora = [name for name in tensors if _LORA_KEY.search(name)]
    if lora:
        return [
            f"{lora[0]}: a LoRA key ({len(lora)} in all); fuse the adapter first (fuse_lora), then save and convert"
        ]
    return []


def match_names(checkpoint: Checkpoint, expected: Mapping[str, object], ignore: Sequence[str]) -> list[str]:
    """Issues where the checkpoint lacks a tensor of the model or carries quantizer state, by name.

    `expected` are the names of the model that must be stored; `ignore` are the class's own
    `_keys_to_ignore_on_load_unexpected` patterns.
    """
    missing = [name for name in expected if name not in checkpoint.tensors]
    unexpected = unexpected_names(checkpoint, expected, ignore)
    original = [name for name in unexpected if _ORIGINAL_KEY.match(name)]
    if original:
        return [
            f"{original[0]}: an original-format key ({len(original)} in all), not diffusers layout; convert it first: "
            "from_single_file(...) then save_pretrained(...)"
        ]
    issues = [
        f"{name}: the model has it, the checkpoint does not; fetch or save the checkpoint again" for name in missing
    ]
    for name in unexpected:
        if _QUANTIZED_KEY.search(name):
            issues.append(
                f"{name}: looks like quantizer state, the model has no such tensor; convert an unquantized one"
            )
    if missing and unexpected:
        issues.append(f"the checkpoint has instead: {shorten(unexpected)}; are config and weights of one model?")
    wrapper = next((w for w in _WRAPPERS if missing and all(name.startswith(w) for name in unexpected)), None)
    if wrapper and unexpected:
        issues.append(f"{unexpected[0]}: every name starts with {wrapper!r}; save the model without its wrapper")
    return issues


def unexpected_names(checkpoint: Checkpoint, expected: Iterable[str], ignore: Sequence[str]) -> list[str]:
    """Tensors that the model does not have and its class does not tell to ignore, in source order."""
    known = set(expected)
    return [
        name
        for name in checkpoint.tensors
        if name not in known and not any(re.search(pattern, name) for pattern in ignore)
    ]


def _no_weights(folder: Path, names: Sequence[str], variant: str | None, step: str) -> str:
    if LORA_FILE in names:
        return f"{folder}: holds a LoRA ({LORA_FILE}), not a model; fuse it into its base model first (fuse_lora)"
    for suffixes, what in ((PICKLE_SUFFIXES, "pickled"), (_FOREIGN_SUFFIXES, "foreign-format")):
        found = [name for name in names if name.endswith(suffixes)]
        if found:
            return (
                f"{folder}: only {what} weights ({found[0]}), expected safetensors; load it with diffusers and save it "
                "with save_pretrained(..., safe_serialization=True)"
            )
    single = [name for name in names if name.endswith(".safetensors")]
    if single:
        hint = "" if variant else "; if it is a variant, name it with --variant"
        return f"{folder}: expected {WEIGHTS_STEM}.safetensors or its index, found {', '.join(single[:3])}{hint}"
    return f"{folder}: no weights ({WEIGHTS_STEM}*.safetensors); {step}"


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
