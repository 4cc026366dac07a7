"""What `shardconv check` starts: one process builds the model and runs it whole, then forks the ranks that shard it.

The ranks inherit the model and what its layers gave, so that nothing is built or computed twice.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from loader.parallel import parallelize, take_slice

from ..errors import ShardconvError
from ..format.cut import Cut
from ..format.plan import STYLES, PlanChoice
from ..plans.catalogue import cases
from ..plans.choice import plan_of
from ..plans.resolve import Resolution, resolve

LAYER_TOLERANCE = 1e-4  # of a layer's largest value; layers in the middle may amplify what the output does not show
SHOWN = 5  # layers that differ
PATIENCE_S = 20.0  # for ranks that another one left behind

Record = dict[tuple[str, int], torch.Tensor]  # (layer, how often it ran before) -> output, in the order of the calls


@dataclass(frozen=True, slots=True)
class _Reference:
    model: nn.Module
    layers: Record
    outputs: list[torch.Tensor]


def main(folder: str) -> None:
    """Do the job in `folder/job.json`, leave `folder/report.json`."""
    torch.set_num_threads(1)  # threads do not survive a fork
    job = json.loads(Path(folder, "job.json").read_text())
    model = cases.build(job["model_class"], job["config"])
    layers, outputs = _watched(model)
    reference = _Reference(model, layers, outputs)
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_rank, args=(rank, folder, job["tp"], PlanChoice.from_json(job["choice"]), reference))
        for rank in range(job["tp"])
    ]
    for rank in ranks:
        rank.start()
    paths = [Path(folder, f"rank-{rank}.json") for rank in range(job["tp"])]
    died = _join(ranks, paths)
    report = {"died": died} if died else _worst(paths)
    Path(folder, "report.json").write_text(json.dumps(report))


def _join(ranks: Sequence[BaseProcess], reports: Sequence[Path]) -> tuple[int, int] | None:
    """Wait for all, but not for those that wait for one which has failed: they are killed. The number and exit code of
    the first that ended without a report."""
    running = dict(enumerate(ranks))
    end = math.inf
    died: list[tuple[int, int]] = []
    while running and not died and time.monotonic() < end:
        wait([rank.sentinel for rank in running.values()], None if end == math.inf else end - time.monotonic())
        for number, rank in list(running.items()):
            if rank.exitcode is None:
                continue
            del running[number]
            if rank.exitcode or not reports[number].is_file():
                died.append((number, rank.exitcode))
            elif json.loads(reports[number].read_text())["issues"]:
                end = min(end, time.monotonic() + PATIENCE_S)
    for rank in running.values():
        rank.kill()
        rank.join()
    return min(died, key=lambda each: each[1] >= 0, default=None)  # a kill is what others die from


def _worst(paths: Iterable[Path]) -> dict[str, Any]:
    """The report of the first rank that had issues, others may have theirs from it; else the largest difference."""
    there = sorted((path for path in paths if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    reports = [json.loads(path.read_text()) for path in there]
    return dict(max(reports, key=lambda report: (bool(report["issues"]), report["difference"] or 0.0)))


def _rank(rank: int, folder: str, tp: int, choice: PlanChoice, reference: _Reference) -> None:
    said = os.open(Path(folder, f"rank-{rank}.said"), os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 2)  # what it says when it dies is told apart from what the others say
    store = dist.FileStore(str(Path(folder, "store")), tp)  # type: ignore[attr-defined]  # public, says its documentation
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp, timeout=timedelta(seconds=PATIENCE_S))
    report: dict[str, Any] = {"difference": None, "issues": [], "layers": []}
    layers: Record = {}
    cuts: dict[str, Cut] = {}
    running: list[str] = []
    try:
        rules = plan_of(reference.model, choice, tp)
        cuts = _cuts(reference.model, resolve(reference.model, rules, tp))
        _, outputs = _watched(parallelize(reference.model, plan=rules), layers, running)
        report["difference"] = max(map(_difference, outputs, reference.outputs))
    except ShardconvError as error:
        report["issues"] = list(error.issues)
    except Exception as error:  # whatever the model's own code raises
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            raise  # which says nothing about the plan
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        report["issues"] = [f"{running[-1] if running else 'the model'}: {type(error).__name__}: {error} ({place})"]
    report["layers"] = list(_differing(layers, reference.layers, cuts, rank, tp))[:SHOWN]
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(report))


def _watched(
    model: nn.Module, layers: Record | None = None, running: list[str] | None = None
) -> tuple[Record, list[torch.Tensor]]:
    """The output of every layer of one call, and the model's. `running` holds the layers being run, innermost last."""
    record: Record = {} if layers is None else layers
    inside: list[str] = [] if running is None else running
    calls: dict[str, int] = {}

    def watch(name: str, module: nn.Module) -> Iterator[Any]:
        def begin(module: nn.Module, args: Any) -> None:
            inside.append(name)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            inside.pop()
            if isinstance(output, torch.Tensor):
                record[name, calls.setdefault(name, 0)] = output.detach().clone()
                calls[name] += 1

        yield module.register_forward_pre_hook(begin)
        yield module.register_forward_hook(end)

    hooks = [hook for name, module in model.named_modules() if name for hook in watch(name, module)]
    try:
        return record, cases.outputs(model, cases.inputs(model))
    finally:
        for hook in hooks:
            hook.remove()


def _cuts(model: nn.Module, resolution: Resolution) -> dict[str, Cut]:
    """Layer -> how its output is cut, for those whose output stays sharded."""
    sharded = [module for module in resolution.modules if STYLES[module.style].output == "local"]
    channels = {module.name: 1 if isinstance(model.get_submodule(module.name), nn.Conv2d) else -1 for module in sharded}
    return {module.name: Cut(channels[module.name], module.cut.block_sizes) for module in sharded}


def _differing(layers: Record, whole: Record, cuts: Mapping[str, Cut], rank: int, tp: int) -> Iterator[dict[str, Any]]:
    """The layers that give something else than they should, in the order in which they ran."""
    for key, found in layers.items():
        expected = whole.get(key)
        if expected is not None and key[0] in cuts:
            expected = take_slice(expected, cuts[key[0]], rank, tp)
        if expected is not None and found.shape == expected.shape:
            difference = _difference(found, expected)
            if difference > LAYER_TOLERANCE:
                yield {"layer": key[0], "difference": difference}


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, relative to the largest expected value; infinite for what is not a number."""
    if found.shape != expected.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    largest = float(expected.double().abs().max()) or 1.0
    difference = float((found.double() - expected.double()).abs().max()) / largest
    return difference if difference == difference else float("inf")


if __name__ == "__main__":
    main(*sys.argv[1:])
