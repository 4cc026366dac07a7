"""The answer that every contestant must give: each tensor cut with torch, by the specs that diffusers itself resolves.

    python benchmarks/oracle.py expect SOURCE TP        # digests by rank, as JSON
    python benchmarks/oracle.py small NAME OUT DTYPE    # a small model's checkpoint, for tiny runs

Nothing of shardconv's slicing takes part. The scripted conversion of bench_convert.py cuts with the same function.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import common
import torch
import xxhash
from safetensors import safe_open

Specs = Mapping[str, Any]  # parameter name -> diffusers' TPShardSpec


def take(tensor: torch.Tensor, spec: Any, rank: int, tp: int) -> torch.Tensor:
    """What `rank` of `tp` holds of a whole `tensor`."""
    if spec is None or spec.dim is None:
        return tensor
    parts = [block.chunk(tp, spec.dim)[rank] for block in torch.split(tensor, spec.block_sizes, spec.dim)]
    return torch.cat(parts, spec.dim).contiguous()


def model_specs(source: Path, tp: int) -> Specs:
    """How diffusers cuts the model whose config stands in `source`."""
    import diffusers
    from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs

    config = json.loads((source / "config.json").read_text())
    cls = getattr(diffusers, config["_class_name"])
    with torch.device("meta"):
        model = cls.from_config(config)
    specs: Specs = resolve_tp_shard_specs(model, cls._tp_plan, tp)
    return specs


def tensors_of(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, one at a time."""
    for path in common.files_in(source):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safe_open is no dict)
                yield name, file.get_tensor(name)


def describe(tensor: torch.Tensor) -> str:
    """As `common.describe`, of a tensor in memory, on any device."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return common.describe(dtype, tuple(tensor.shape), xxhash.xxh3_128_hexdigest(flat.numpy().data))


def expect(source: Path, tp: int) -> dict[str, Any]:
    """`{"ranks": [descriptions by name, by rank], "replicated": descriptions by name}`."""
    specs = model_specs(source, tp)
    ranks: list[dict[str, str]] = [{} for _ in range(tp)]
    replicated = {}
    for name, tensor in tensors_of(source):
        spec = specs.get(name)
        if spec is None or spec.dim is None:
            replicated[name] = describe(tensor)
        else:
            for rank in range(tp):
                ranks[rank][name] = describe(take(tensor, spec, rank, tp))
    return {"ranks": ranks, "replicated": replicated}


def make_small(name: str, out: Path, dtype: str) -> None:
    """The small model `name`, saved as diffusers saves it, in a few files."""
    from shardconv.plans.catalogue import small_models

    small_models.build(name).to(getattr(torch, dtype)).save_pretrained(out, max_shard_size="1MB")


if __name__ == "__main__":
    if sys.argv[1] == "expect":
        print(json.dumps(expect(Path(sys.argv[2]), int(sys.argv[3]))))
    else:
        make_small(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
