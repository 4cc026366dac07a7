"""What can be read but must not be cut, each by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import CheckpointError
from ..format.header import FileHeader
from ..format.names import CONFIG_NAME, LORA_FILE, PICKLE_SUFFIXES

_FOREIGN_SUFFIXES = (".gguf", ".msgpack", ".flashpack", ".onnx")
_LORA_KEY = re.compile(r"(^|\.)(lora_[AB]|lora_(up|down)|base_layer|lora)(\.|$)|lora_(up|down)\.weight$")
ORIGINAL_KEY = re.compile(r"^(double_blocks|single_blocks|joint_blocks|model\.diffusion_model|net\.blocks)\.")
QUANTIZED_KEY = re.compile(
    r"(\.|_)(scale|scale_inv|scales|scale_weight|input_scale|weight_scale|absmax|quant_map|nested_absmax|zero_point|"
    r"zeros|qweight|qzeros|g_idx|SCB)$|\.quant_state\."
)


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
    if any(map(ORIGINAL_KEY.match, names)):
        return CheckpointError(
            f"{path}: an original-format single file, not diffusers layout; convert it first: "
            "from_single_file(...) then save_pretrained(...)"
        )
    return CheckpointError(f"{path}: expected a component folder with {CONFIG_NAME}, found one file; give its folder")


def refusals_of(names: Iterable[str]) -> list[str]:
    """Checkpoints that can be read but must not be cut, each by name."""
    lora = [name for name in names if _LORA_KEY.search(name)]
    if lora:
        return [
            f"{lora[0]}: a LoRA key ({len(lora)} in all); fuse the adapter first (fuse_lora), then save and convert"
        ]
    return []


def no_weights(folder: Path, names: Sequence[str], variant: str | None, step: str, stem: str) -> str:
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
        return f"{folder}: expected {stem}.safetensors or its index, found {', '.join(single[:3])}{hint}"
    return f"{folder}: no weights ({stem}*.safetensors); {step}"
