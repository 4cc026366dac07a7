"""Cold start: from the start of the processes to the output of the first forward, on 2 gloo ranks.

    python benchmarks/bench_start.py --gb 5 --files 3 --model flux --ranks 2 --rounds 6 --work /tmp/bench

The page cache holds Python and the libraries but none of the weights. Contestants, each two processes started as
torchrun starts them, running a serving script as one would write it (the scripts stand in this file):

- ours; and ours with `prefetch` as the script's first line;
- diffusers' own `from_pretrained(parallel_config=...)`, which slices the ordinary checkpoint while it reads;
- the parts alone: imports and process group without a load; `dd` of every file of ours.

The clock is time.monotonic of all processes and ends with the last rank's output. After it each rank hashes what it
holds, which must be what oracle.py expects, and outputs are compared across contestants.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
from common import GB, Contestant, Sample

OURS, PREFETCH, STREAMING = "ours", "ours + prefetch", "diffusers streaming"
IMPORTS, DD = "imports + process group", "dd of our files"
TOLERANCE = 0.05  # of the largest output; bf16, the sums of two ranks in another order

HEAD = """
import sys, time
stamps = {"python": time.monotonic()}
{first}
import torch
import torch.distributed as dist
{imports}
dist.init_process_group("gloo")
stamps["group"] = time.monotonic()
"""

ON_CPU = "from peers import let_diffusers_shard_on_cpu\nlet_diffusers_shard_on_cpu()"
OURS_TOO = "import loader.load"
LOAD_OURS = """
model = loader.load_model({out!r}, device="cpu")
"""

LOAD_STREAMING = """
from diffusers.models._modeling_parallel import TensorParallelConfig
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
config = TensorParallelConfig(tp_degree=dist.get_world_size(), mesh=mesh)
model = {cls}.from_pretrained({source!r}, torch_dtype=torch.bfloat16, parallel_config=config)
"""

TAIL = """
stamps["loaded"] = time.monotonic()
import forward

with torch.inference_mode():
    output = model(**forward.inputs(model.config, torch.bfloat16), return_dict=False)[0]
stamps["output"] = time.monotonic()

import json
from oracle import describe
from peers import local_state

held = {name: describe(tensor) for name, tensor in local_state(model).items()}
print(json.dumps({"stamps": stamps, "held": held, "samples": forward.samples(output)}))
dist.destroy_process_group()
"""

TAIL_EMPTY = """
import json

print(json.dumps({"stamps": stamps | {"output": time.monotonic()}}))
dist.destroy_process_group()
"""


def script(name: str, source: Path, out: Path) -> str:
    """The serving script of a contestant."""
    cls = json.loads((source / "config.json").read_text())["_class_name"]
    first = f"import loader; loader.prefetch({str(out)!r})" if name == PREFETCH else ""
    imports = {STREAMING: f"from diffusers import {cls}\n{ON_CPU}", IMPORTS: f"from diffusers import {cls}\n{OURS_TOO}"}
    text = HEAD.replace("{first}", first).replace("{imports}", imports.get(name, "import loader"))
    if name == IMPORTS:
        return text + TAIL_EMPTY
    load = LOAD_STREAMING if name == STREAMING else LOAD_OURS
    return text + load.format(out=str(out), source=str(source), cls=cls) + TAIL


class Bench:
    """One checkpoint, the scripts, and what every rank must hold."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.source = common.checkpoint(args)
        self.out = common.converted(self.source, args.ranks)
        ranks, replicated = common.expected_slices(self.source, args.ranks)
        self.expected = [part | replicated for part in ranks]
        self.files = common.files_in(self.out / f"tp{args.ranks}")
        self.scripts = args.work / "scripts"
        shutil.rmtree(self.scripts, ignore_errors=True)
        self.scripts.mkdir()
        self.outputs: dict[str, list[float]] = {}

    def contestants(self) -> list[Contestant]:
        """All of them, cold."""
        weights = common.files_in(self.source)
        found: list[Contestant] = []
        for name in (PREFETCH, OURS, STREAMING, IMPORTS):
            path = self.scripts / f"{len(found)}.py"
            path.write_text(script(name, self.source, self.out))
            reads = weights if name == STREAMING else self.files
            found.append(Contestant(name, self._runner(name, path), partial(self._cold, reads)))
        found.append(Contestant(DD, self._dd, partial(self._cold, self.files)))
        return [each for each in found if not self.args.only or each.name in self.args.only]

    def _cold(self, paths: list[Path]) -> Sample:
        common.settle()
        return common.drop(paths)

    def _runner(self, name: str, path: Path) -> Callable[[], Sample]:
        def run() -> Sample:
            ends = common.run_ranks(common.python(path), self.args.ranks)
            self._verify(name, [end.result for end in ends])
            stamps = [end.result["stamps"] for end in ends]
            order = [key for key in ("python", "group", "loaded", "output") if key in stamps[0]]
            times = {key: max(each[key] for each in stamps) - ends[0].started for key in order}
            return {"seconds": times["output"], **{f"until_{key}_s": times[key] for key in order[:-1]}}

        return run

    def _verify(self, name: str, results: list[dict[str, Any]]) -> None:
        if name == IMPORTS:
            return
        for rank, result in enumerate(results):
            common.check_equal(f"{name}, rank {rank}", result["held"], self.expected[rank])
        self.outputs[name] = results[0]["samples"]

    def differences(self) -> dict[str, float]:
        """Of each contestant's output from the first one's; too large a one is an error."""
        first = next(iter(self.outputs.values()), [])
        most = max(map(abs, first), default=1.0)
        found = {}
        for name, values in self.outputs.items():
            found[name] = max(abs(a - b) for a, b in zip(values, first, strict=True)) / most
            if not found[name] <= TOLERANCE:
                raise RuntimeError(f"{name}: its output is off by {found[name]} of the largest value")
        return found

    def _dd(self) -> Sample:
        child = common.run_child(["sh", "-c", common.READ, "sh", *map(str, self.files)])
        return {"seconds": child.seconds, "disk_read_gb": child.disk_read_nbytes / GB}


def figures(samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """What issue 3, point 3, sets limits to."""
    found = []
    for name in (OURS, PREFETCH):
        found.append(common.figure(f"{name} over diffusers streaming", common.paired(samples, name, [STREAMING]), 0.6))
        longest = common.paired(samples, name, [IMPORTS, DD])
        found.append(common.figure(f"{name} over the longer of imports + group and dd", longest, 1.15))
        loaded = {name: [{"seconds": each.get("until_loaded_s", 0.0)} for each in samples.get(name, [])]}
        parts = {part: samples[part] for part in (IMPORTS, DD) if part in samples}
        if name in samples and len(parts) == 2:
            longest = common.paired(loaded | parts, name, [IMPORTS, DD])
            found.append(common.figure(f"{name}, up to the loaded model, over the longer of the two", longest, 1.15))
    return [each for each in found if each["value"] is not None]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_checkpoint_flags(parser, "start")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contestants")
    args = parser.parse_args()
    bench = Bench(args)
    common.say("start, cold")
    samples = common.take_turns(bench.contestants(), args.rounds)
    baseline = STREAMING if STREAMING in samples else next(iter(samples))
    report = common.document(
        "How long from the start of the processes to the first output?",
        args.work,
        checkpoint=common.checkpoint_record(args, bench.source),
        ranks={"ranks": args.ranks, "nbytes_of_the_set": common.nbytes_of(bench.files)},
        rounds=args.rounds,
        tables=[common.table(f"Cold start, {args.ranks} gloo ranks", samples, baseline, common.COLD)],
        figures=figures(samples),
        output_differences=bench.differences(),
        verified="what every rank holds, every round, by xxh3-128 against slices cut with torch",
    )
    common.write(args.results, args.name, report)


if __name__ == "__main__":
    main()
