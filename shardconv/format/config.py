"""`config.json` of a component: read, and told apart."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ..errors import CheckpointError
from ..system.jsonfile import parse, read_bounded
from ..system.links import names_in, refuse_link_out
from .names import CONFIG_NAME, LORA_FILE, PICKLE_SUFFIXES

# `_class_name` of releases in their makers' own layout -> the same weights, or some of them, as diffusers takes them
_ORIGINAL_CLASSES = {
    "WanModel": "Wan-AI/Wan2.1-T2V-14B-Diffusers or Skywork/SkyReels-V2-T2V-14B-540P-Diffusers",
    "VaceWanModel": "Wan-AI/Wan2.1-VACE-14B-diffusers",
    "WanAnimateModel": "Wan-AI/Wan2.2-Animate-14B-Diffusers",
    "HunyuanVideo_1_5_DiffusionTransformer": "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v",
}


def read_config(folder: Path) -> tuple[dict[str, Any], bytes]:
    """`config.json` of a component folder, parsed and as bytes. Raises `CheckpointError` when it is unusable."""
    path = folder / CONFIG_NAME
    refuse_link_out(path)
    try:
        raw = read_bounded(path)
        config = parse(raw, unique=False)
    except FileNotFoundError:
        raise CheckpointError(no_config(str(folder), names_in(folder))) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); fetch it again") from None
    if isinstance(config, dict) and "_class_name" not in config:
        config |= _of_architectures(config)
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


def _of_architectures(config: Mapping[str, Any]) -> dict[str, str]:
    """transformers' name for the class, as diffusers would give it."""
    named = config.get("architectures")
    return {"_class_name": named[0]} if isinstance(named, list) and named and isinstance(named[0], str) else {}


def _original_release(path: Path, config: Any) -> str | None:
    """What to use instead, when the config at `path` is of a release that is not in diffusers layout."""
    name = config.get("_class_name") if isinstance(config, dict) else None
    if not isinstance(name, str) or name not in _ORIGINAL_CLASSES:
        return None
    return (
        f"{path}: of a release in its makers' own layout ({name}), not in diffusers layout; use the release for "
        f"diffusers, which is named alike, such as {_ORIGINAL_CLASSES[name]}"
    )


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
