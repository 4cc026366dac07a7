"""What one step costs with our modules, against diffusers' DTensor path, on 2 gloo ranks.

    python benchmarks/bench_step.py --rounds 6 --steps 10 --shapes small medium large

Both models hold the same seeded weights in the same processes and take turns, step groups paired; before a group all
ranks meet at a barrier. Their outputs are compared with each other and with the unsharded model. One transformer block
is compiled with `torch.compile(fullgraph=True)`, which fails at the first graph break.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import common
from common import Sample

OURS, DTENSOR = "ours", "diffusers DTensor"
TOLERANCE = 1e-4  # of the largest output, fp32
WARM_UPS = 2

# FLUX's proportions: heads x channels is the width, the MLP is four times that; rotary axes sum to the channels.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"heads": 4, "channels": 16, "axes": [4, 6, 6], "blocks": 1, "image": 16, "text": 8},
    "small": {"heads": 8, "channels": 32, "axes": [8, 12, 12], "blocks": 4, "image": 64, "text": 32},
    "medium": {"heads": 8, "channels": 128, "axes": [16, 56, 56], "blocks": 2, "image": 256, "text": 64},
    "large": {"heads": 24, "channels": 128, "axes": [16, 56, 56], "blocks": 1, "image": 256, "text": 128},
}


# --- on a rank ---


def build(shape: dict[str, Any]) -> Any:
    """A FLUX transformer of `shape` with seeded weights, in fp32."""
    from diffusers import FluxTransformer2DModel

    from shardconv.plans.catalogue import small_models

    model = FluxTransformer2DModel(
        num_attention_heads=shape["heads"],
        attention_head_dim=shape["channels"],
        axes_dims_rope=shape["axes"],
        num_layers=shape["blocks"],
        num_single_layers=shape["blocks"],
        joint_attention_dim=shape["heads"] * shape["channels"],
        pooled_projection_dim=256,
        guidance_embeds=True,
    )
    small_models.randomize(model, seed=0)
    return model.eval().requires_grad_(False)


def rank_main(asked: dict[str, Any]) -> dict[str, Any]:
    """Everything one rank does: both models, the comparison, the turns."""
    import forward
    import torch
    import torch.distributed as dist
    from peers import let_diffusers_shard_on_cpu, tp_config

    import loader

    dist.init_process_group("gloo")
    let_diffusers_shard_on_cpu()
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    for name in asked["shapes"]:
        shape = SHAPES[name]
        theirs = build(shape)
        given = forward.inputs(theirs.config, torch.float32, shape["image"], shape["text"])
        with torch.inference_mode():
            whole = theirs(**given, return_dict=False)[0]
        theirs.enable_parallelism(config=tp_config(dist.get_world_size(), "cpu"))
        models = {OURS: loader.parallelize(build(shape)), DTENSOR: theirs}
        with torch.inference_mode():
            outputs = {who: model(**given, return_dict=False)[0] for who, model in models.items()}
        most = float(whole.abs().max())
        differences = {who: float((output - whole).abs().max()) / most for who, output in outputs.items()}
        found[name] = {
            "parameters": sum(parameter.numel() for parameter in models[OURS].parameters()),
            "differences": differences,
            "turns": take_turns(models, given, asked["rounds"], asked["steps"]),
        }
        if asked["backend"]:
            found[name]["compiled_difference"] = compiled(models[OURS], given, whole, asked["backend"])
    dist.barrier()
    dist.destroy_process_group()
    return found


def take_turns(models: dict[str, Any], given: dict[str, Any], rounds: int, steps: int) -> list[dict[str, float]]:
    """Seconds of one step by model, for each round: the mean of `steps`, the order turned round every time."""
    import torch
    import torch.distributed as dist

    def group(model: Any, num: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num):
            model(**given, return_dict=False)
        return (time.perf_counter() - start) / num

    with torch.inference_mode():
        for model in models.values():
            group(model, WARM_UPS)
        taken = []
        for round_ in range(rounds):
            names = list(models)[:: 1 if round_ % 2 == 0 else -1]
            taken.append({name: group(models[name], steps) for name in names})
    return taken


def compiled(model: Any, given: dict[str, Any], whole: Any, backend: str) -> float:
    """Compile one block of each kind with no graph break allowed; the output's difference from the unsharded one."""
    import torch

    for blocks in (model.transformer_blocks, model.single_transformer_blocks):
        blocks[0].compile(fullgraph=True, backend=backend)
    with torch.inference_mode():
        output = model(**given, return_dict=False)[0]
    return float((output - whole).abs().max() / whole.abs().max())


# --- in the measuring process ---


def samples_of(ends: list[dict[str, Any]], shape: str) -> dict[str, list[Sample]]:
    """By contestant; a step is over when the slowest rank is done."""
    rounds = zip(*(end[shape]["turns"] for end in ends), strict=True)
    samples: dict[str, list[Sample]] = {OURS: [], DTENSOR: []}
    for turns in rounds:
        for name, taken in samples.items():
            taken.append({"seconds": max(turn[name] for turn in turns)})
    return samples


def check(ends: list[dict[str, Any]], shape: str) -> None:
    """Raise when an output is not the unsharded model's."""
    for rank, end in enumerate(ends):
        found = end[shape]["differences"] | {"compiled": end[shape].get("compiled_difference", 0.0)}
        for name, value in found.items():
            if not value <= TOLERANCE:
                raise RuntimeError(f"{shape}, rank {rank}, {name}: off by {value} of the largest output")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="in a group")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["small", "medium", "large"])
    parser.add_argument("--backend", help="of torch.compile; default: inductor with a C++ compiler, else aot_eager")
    parser.add_argument("--results", type=Path, default=common.RESULTS, metavar="DIR")
    args = parser.parse_args()
    backend = args.backend or ("inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager")
    asked = {"shapes": args.shapes, "rounds": args.rounds, "steps": args.steps, "backend": backend}
    ends = [end.result for end in common.run_ranks(common.python(__file__, "--rank", json.dumps(asked)), args.ranks)]
    tables, figures = [], []
    for shape in args.shapes:
        check(ends, shape)
        samples = samples_of(ends, shape)
        about = ", ".join(f"{key} {value}" for key, value in SHAPES[shape].items())
        tables.append(common.table(f"One step, {shape}", samples, DTENSOR, f"fp32; {about}"))
        limit = 0.9 if shape in ("tiny", "small") else 1.0
        figures.append(common.figure(f"{shape}: ours over DTensor", common.paired(samples, OURS, [DTENSOR]), limit))
    report = common.document(
        "What does a step cost against diffusers' DTensor path?",
        common.HERE,
        rounds=args.rounds,
        steps_in_a_group=args.steps,
        ranks={"ranks": args.ranks, "threads_each": ends[0]["threads"]},
        tables=tables,
        figures=figures,
        compiled={"backend": backend, "fullgraph": True, "blocks": "the first of each kind"},
        differences={shape: ends[0][shape]["differences"] for shape in args.shapes},
        verified="outputs against the unsharded model in the same process",
    )
    common.write(args.results, "step", report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        print(json.dumps(rank_main(json.loads(sys.argv[2]))))
    else:
        main()
