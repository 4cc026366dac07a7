"""What a diffusers component folder holds: config, weight files, tensors. Headers are read, never weights.

The index is the only authority on which files belong to the checkpoint; files beside it are ignored with one warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ..errors import CheckpointError
from ..format.header import FileHeader, TensorEntry
from ..format.names import CONFIG_NAME, LORA_FILE, MANIFEST_NAME, PICKLE_SUFFIXES, WEIGHTS_STEM
from ..system.jsonfile import parse, read_bounded
from ..system.links import strange_link

_FOREIGN_SUFFIXES = (".gguf", ".msgpack", ".flashpack", ".onnx")
_LORA_KEY = re.compile(r"(^|\.)(lora_[AB]|lora_(up|down)|base_layer|lora)(\.|$)|lora_(up|down)\.weight$")
_ORIGINAL_KEY = re.compile(r"^(double_blocks|single_blocks|joint_blocks|model\.diffusion_model|net\.blocks)\.")
_QUANTIZED_KEY = re.compile(
    r"(\.|_)(scale|scale_inv|scales|scale_weight|input_scale|weight_scale|absmax|quant_map|nested_absmax|zero_point|"
    r"zeros|qweight|qzeros|g_idx|SCB)$|\.quant_state\."
)
_WRAPPERS = ("module.", "_orig_mod.", "model.")
# `_class_name` of releases in their makers' own layout -> the same weights, or some of them, as diffusers takes them
_ORIGINAL_CLASSES = {
    "WanModel": "Wan-AI/Wan2.1-T2V-14B-Diffusers or Skywork/SkyReels-V2-T2V-14B-540P-Diffusers",
    "VaceWanModel": "Wan-AI/Wan2.1-VACE-14B-diffusers",
    "WanAnimateModel": "Wan-AI/Wan2.2-Animate-14B-Diffusers",
    "HunyuanVideo_1_5_DiffusionTransformer": "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v",
}


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


@dataclass(frozen=True, slots=True)
class Selection:
    """Which file names of a folder make up the checkpoint."""

    index: str | None
    single: str | None
    variant: str | None


def read_config(folder: Path) -> tuple[dict[str, Any], bytes]:
    """`config.json` of a component folder, parsed and as bytes. Raises `CheckpointError` when it is unusable."""
    path = folder / CONFIG_NAME
    _refuse_link_out(path)
    try:
        raw = read_bounded(path)
        config = parse(raw, unique=False)
    except FileNotFoundError:
        raise CheckpointError(no_config(str(folder), _names(folder))) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(config, dict) or not isinstance(config.get("_class_name"), str):
        raise CheckpointError(f"{path}: expected a diffusers config with _class_name, found none; is it a component?")
    if release := _original_release(path, config):
        raise CheckpointError(release)
    if config.get("quantization_config") is not None:
        method = config["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise CheckpointError(
            f"{path}: the checkpoint is quantized ({method}), quantized weights cannot be cut; "
            "convert the unquantized checkpoint"
        )
    return config, raw


def _original_release(path: Path, config: Any) -> str | None:
    """What to use instead, when the config at `path` is of a release that is not in diffusers layout."""
    name = config.get("_class_name") if isinstance(config, dict) else None
    if not isinstance(name, str) or name not in _ORIGINAL_CLASSES:
        return None
    return (
        f"{path}: of a release in its makers' own layout ({name}), not in diffusers layout; use the release for "
        f"diffusers, which is named alike, such as {_ORIGINAL_CLASSES[name]}"
    )


def _is_converted(folder: Path, names: Sequence[str]) -> bool:
    return MANIFEST_NAME in names or any((folder / name / MANIFEST_NAME).is_file() for name in names)


def config_digest(config: Mapping[str, Any]) -> str:
    """xxh3-128 over what decides the computation: all keys but private ones (versions, where it was loaded from)."""
    public = {key: value for key, value in config.items() if not key.startswith("_")}
    return xxhash.xxh3_128_hexdigest(json.dumps(public, sort_keys=True, separators=(",", ":")).encode())


def no_config(folder: str, names: Sequence[str]) -> str:
    """The sentence for a place that has `names` and no config among them: what it is instead, and what to do."""
    if LORA_FILE in names:
        return f"{folder}: holds a LoRA ({LORA_FILE}), not a model; fuse it into its base model first (fuse_lora)"
    for name in names:  # Wan 2.2 in its own layout has a folder for high and one for low noise
        with contextlib.suppress(OSError, ValueError):
            path = Path(folder, name, CONFIG_NAME)
            if release := _original_release(path, parse(read_bounded(path), unique=False)):
                return release
    single = [name for name in names if name.endswith((".safetensors", *PICKLE_SUFFIXES))]
    if single:
        return (
            f"{folder}: no {CONFIG_NAME}, found {single[0]}; an original-format file is not diffusers layout, convert "
            "it first: from_single_file(...) then save_pretrained(...)"
        )
    return f"{folder}: no {CONFIG_NAME}; give a diffusers component folder or a pipeline folder"


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


def select_files(names: Iterable[str], variant: str | None, stem: str = WEIGHTS_STEM) -> Selection | None:
    """The index or single weight file that `from_pretrained(variant=...)` takes among `names`; None when none fits.

    Names as diffusers has used them: `X.safetensors.index.fp16.json` (now), `X.safetensors.fp16.index.json` (before),
    `X.fp16.safetensors`. A folder without files of the variant falls back to the default files, as pipelines do. `stem`
    is the X; transformers' components have "model".
    """
    present = set(names)
    tags = [variant, None] if variant else [None]
    for tag in tags:
        indexes = [f"{stem}.safetensors.index{'.' + tag if tag else ''}.json"]
        if tag:
            indexes.append(f"{stem}.safetensors.{tag}.index.json")
        single = f"{stem}{'.' + tag if tag else ''}.safetensors"
        index = next((name for name in indexes if name in present), None)
        if index or single in present:
            return Selection(index, None if index else single, tag)
    return None


_VARIANTS = (  # how the name of a single file or of an index tells its variant, now and before
    re.compile(r"(\.(?P<variant>(?!.*-\d+-of-\d+)[\w-]+))?\.safetensors"),
    re.compile(r"\.safetensors\.index(\.(?P<variant>[\w-]+))?\.json"),
    re.compile(r"\.safetensors\.(?P<variant>[\w-]+)\.index\.json"),
)


def variants_in(names: Iterable[str]) -> set[str | None]:
    """Variants of weights among file names, which may be in folders; of diffusers' components and of transformers'. The
    default ones are None; shards without their index are no weights."""
    found: set[str | None] = set()
    for name in (name.rpartition("/")[2] for name in names):
        stem = next((stem for stem in (WEIGHTS_STEM, "model") if name.startswith(stem)), None)
        matches = (pattern.fullmatch(name[len(stem) :]) for pattern in _VARIANTS) if stem else ()
        found |= {match["variant"] for match in matches if match}
    return found


def check_variant(place: object, names: Iterable[str], variant: str | None) -> None:
    """Raises `CheckpointError` when no file has the variant, as when it is mistyped."""
    found = variants_in(names)
    if variant is not None and variant not in found:
        there = ", ".join(name or "the default ones" for name in sorted(found, key=lambda name: name or ""))
        raise CheckpointError(
            f"{place}: expected weights of variant {variant!r}, found {there or 'none'}; choose another --variant or "
            "leave it out"
        )


def open_checkpoint(folder: Path, variant: str | None = None, elsewhere: Iterable[str] = ()) -> Checkpoint:
    """Read config, index and headers of a component folder; every fault found is in one `CheckpointError`.

    `elsewhere`: names of files that the component has where it comes from, fetched or not.
    """
    names = _names(folder)
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


def read_index(path: Path) -> dict[str, str]:
    """`weight_map` of an index: tensor name -> plain file name. Raises `CheckpointError`, every fault at once."""
    _refuse_link_out(path)
    try:
        document = parse(read_bounded(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name}: cannot be read as JSON ({error}); fetch it again") from None
    listed = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(f"{path.name}: expected a weight_map of tensor to file, found none; fetch it again")
    issues = []
    for name in sorted(set(map(str, listed.values()))):
        if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
            issues.append(f"{path.name}: expected plain file names of its own folder, found {name!r}; do not trust it")
        elif not name.endswith(".safetensors"):
            issues.append(f"{path.name}: expected safetensors files, found {name!r}; save it with safe_serialization")
    if issues:
        raise CheckpointError(*issues)
    return listed


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder)) if folder.is_dir() else []


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


def _refuse_link_out(path: Path) -> None:
    outside = strange_link(path)
    if outside:
        raise CheckpointError(f"{path}: a link that leads out of its folder, to {outside}; put the file itself there")


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


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """The first few of `names`, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


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
