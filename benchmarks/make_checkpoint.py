"""Write a checkpoint with an architecture's real widths, a chosen depth and seeded, non-constant weights.

    python benchmarks/make_checkpoint.py --model flux --gb 5 --files 3 /tmp/flux-5gb

Memory stays at one block of random numbers, whatever the size.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from shardconv.format.header import TensorEntry, encode_header
from shardconv.libraries.skeleton import skeleton

BLOCK = 1 << 24  # random elements drawn once; every tensor takes them from another place

# Published configurations (config.json of the model's repo), without depth. Depth is given as option and blocks.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[tuple[str, int], ...]]] = {
    "flux": (
        "FluxTransformer2DModel",
        {"in_channels": 64, "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 4096,
         "pooled_projection_dim": 768, "guidance_embeds": True, "axes_dims_rope": [16, 56, 56]},
        (("num_layers", 19), ("num_single_layers", 38)),
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        {"in_channels": 128, "attention_head_dim": 128, "num_attention_heads": 48, "joint_attention_dim": 15360},
        (("num_layers", 8), ("num_single_layers", 48)),
    ),
    "qwenimage": (
        "QwenImageTransformer2DModel",
        {"in_channels": 64, "out_channels": 16, "attention_head_dim": 128, "num_attention_heads": 24,
         "joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56]},
        (("num_layers", 60),),
    ),
    "qwenimage21": ("QwenImage21Transformer2DModel", {}, (("num_layers", 32),)),
}  # fmt: skip


def config_of(model: str, nbytes: int) -> tuple[str, dict[str, Any]]:
    """Class name and config whose bf16 weights are the most that stay within `nbytes`, depths in real proportion."""
    name, config, depths = MODELS[model]
    best = config | {option: 1 for option, _ in depths}
    for step in range(1, 10_000):
        deepest = max(depth for _, depth in depths)
        candidate = config | {option: max(1, round(step * depth / deepest)) for option, depth in depths}
        if _nbytes(name, candidate) > nbytes:
            break
        best = candidate
    return name, best


def _model(name: str, config: dict[str, Any]) -> Any:
    import diffusers

    return skeleton(getattr(diffusers, name), config)


def _nbytes(name: str, config: dict[str, Any]) -> int:
    return 2 * sum(tensor.numel() for tensor in _model(name, config).state_dict().values())


def write(model: str, nbytes: int, num_files: int, out: Path, seed: int = 0) -> None:
    """Write config.json, `num_files` bf16 weight files of nearly equal size and their index to `out`."""
    name, config = config_of(model, nbytes)
    built = _model(name, config)
    out.mkdir(parents=True)
    built.save_config(out)
    shapes = {key: tuple(tensor.shape) for key, tensor in built.state_dict().items()}
    total = 2 * sum(map(math.prod, shapes.values()))
    block = _random_bf16(seed)
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    done = 0
    for key, shape in shapes.items():
        if done >= total * len(groups) / num_files:
            groups.append({})
        groups[-1][key] = shape
        done += 2 * math.prod(shape)
    weight_map: dict[str, str] = {}
    for position, group in enumerate(groups, 1):
        file = f"diffusion_pytorch_model-{position:05d}-of-{len(groups):05d}.safetensors"
        if len(groups) == 1:
            file = "diffusion_pytorch_model.safetensors"
        _write_file(out / file, group, block)
        weight_map |= dict.fromkeys(group, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def _random_bf16(seed: int) -> np.ndarray[Any, Any]:
    """Normal numbers as bf16 bit patterns."""
    normal = np.random.default_rng(seed).standard_normal(BLOCK, np.float32) * 0.02
    return (normal.view(np.uint32) >> 16).astype(np.uint16)


def _write_file(path: Path, shapes: dict[str, tuple[int, ...]], block: np.ndarray[Any, Any]) -> None:
    entries, position = [], 0
    for name, shape in shapes.items():
        entries.append(TensorEntry(name, "BF16", shape, position, 2 * math.prod(shape)))
        position = entries[-1].end
    with open(path, "wb") as file:
        file.write(encode_header(entries, {"format": "pt"}))
        for number, entry in enumerate(entries):
            left, start = entry.nbytes // 2, (number * 7919 * 1009) % BLOCK
            while left:
                part = block[start : start + left]
                file.write(part.tobytes())
                left -= part.size
                start = 0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="flux")
    parser.add_argument("--gb", type=float, default=5.0, help="most bytes of weights, in GB")
    parser.add_argument("--files", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.model, int(args.gb * 1e9), args.files, args.out, args.seed)


if __name__ == "__main__":
    main()
