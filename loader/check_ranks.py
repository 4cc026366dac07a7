"""What `shardconv check` starts: one process builds the model and runs it whole, then forks the ranks that shard it.

The ranks inherit the model and what its layers gave, so that nothing is built or computed twice.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardconv.auto_rows import AUTO_ROWS, auto_rows
from shardconv.catalogue import cases
from shardconv.checking import how_ended
from shardconv.cut import Cut
from shardconv.errors import ShardconvError
from shardconv.models import class_plan
from shardconv.plan import Plan, parse_plan
from shardconv.resolve import Resolution, resolve

from .parallel import parallelize, take_slice

LAYER_TOLERANCE = 1e-4  # of a layer's largest value; layers in the middle may amplify what the output does not show
SHOWN = 5  # layers that differ
PATIENCE = timedelta(seconds=20)  # for a rank that another one left behind
GRACE_S = 2.0  # for a rank to report when another one has died

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
        fork.Process(target=_rank, args=(rank, folder, job["tp"], job["plan"], reference)) for rank in range(job["tp"])
    ]
    for rank in ranks:
        rank.start()
    ended = _join(ranks)
    reports = [_report(Path(folder, f"rank-{number}.json"), number, ranks[number]) for number in ended]
    worst = max(reports, key=lambda report: (bool(report["issues"]), report["difference"] or 0.0))
    Path(folder, "report.json").write_text(json.dumps(worst))


def _join(ranks: Sequence[BaseProcess]) -> list[int]:
    """Wait for all; where one dies the others, which would wait for it, are killed. Those that ended by themselves."""
    left = list(ranks)
    while left:
        wait([rank.sentinel for rank in left])
        left = [rank for rank in left if rank.is_alive()]
        if any(rank.exitcode for rank in ranks):
            break
    for rank in left:
        rank.join(GRACE_S)
    ended = [number for number, rank in enumerate(ranks) if not rank.is_alive()]
    for rank in left:
        rank.kill()
        rank.join()
    return ended


def _report(path: Path, number: int, rank: BaseProcess) -> dict[str, Any]:
    """What a rank has left; a sentence when its process ended before that."""
    if path.is_file():
        return dict(json.loads(path.read_text()))
    issue = f"rank {number}: its process ended without a report ({how_ended(rank.exitcode or 0)})"
    return {"difference": None, "issues": [issue], "layers": []}


def _rules(model: nn.Module, plan: Mapping[str, Any] | str | None, tp: int) -> Plan:
    if plan == AUTO_ROWS:
        return auto_rows(model, tp)
    return class_plan(model) if plan is None else parse_plan(plan, "plan")


def _rank(rank: int, folder: str, tp: int, plan: Mapping[str, Any] | str | None, reference: _Reference) -> None:
    where = f"file://{Path(folder, 'store').absolute()}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=tp, timeout=PATIENCE)
    report: dict[str, Any] = {"difference": None, "issues": [], "layers": []}
    layers: Record = {}
    cuts: dict[str, Cut] = {}
    running: list[str] = []
    try:
        rules = _rules(reference.model, plan, tp)
        cuts = _cuts(reference.model, resolve(reference.model, rules, tp))
        _, outputs = _watched(parallelize(reference.model, plan=rules), layers, running)
        report["difference"] = max(map(_difference, outputs, reference.outputs))
    except ShardconvError as error:
        report["issues"] = list(error.issues)
    except Exception as error:  # whatever the model's own code raises
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
    sharded = [module for module in resolution.modules if module.cut.dim == 0]
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
