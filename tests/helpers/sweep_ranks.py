"""What the sweep over configs runs: a process builds each model and runs it whole, then forks the ranks that shard it.

The ranks inherit the models and what they gave, so that nothing is built or computed twice; one process group serves
many models.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import catalogue_ranks  # noqa: F401 (imports every class once)
import config_variants
import small_sets
import torch
import torch.distributed as dist

import loader
from shardconv.errors import PlanError, ShardconvError, ShardconvWarning
from shardconv.format.plan import Plan
from shardconv.plans.catalogue import ENTRIES, cases
from shardconv.plans.choice import class_plan

CHUNK = 8  # classes whose models are held at once
WAYS: Mapping[str, Mapping[str, Any]] = {"own": {}, "lean": {"lean": True}, "auto-rows": {"plan": "auto-rows"}}

Outcome = float | str  # largest difference from the unsharded outputs, or why there is none
Outcomes = dict[tuple[str, str, int, str], Outcome]  # by class, changed keys, tp degree, way


@dataclass(frozen=True)
class _Built:
    name: str
    changed: str
    model: Any
    given: dict[str, Any]
    expected: list[torch.Tensor]


def sweep(names: Sequence[str], ways: Sequence[str], everything: bool) -> Outcomes:
    """Of each process's share of the classes: what 2 and 4 ranks find of every config that diffusers runs unsharded.

    Of configs that have the same structure the first is taken, unless `everything` is asked for.
    """
    mine = names[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    found: Outcomes = {}
    for start in range(0, len(mine), CHUNK):
        built = [each for name in mine[start : start + CHUNK] for each in _built(name, everything)]
        for tp in (2, 4):
            for way in ways:
                found |= _sharded(built, tp, way)
    return found


def _built(name: str, everything: bool) -> Iterator[_Built]:
    seen = {config_variants.structure(small := cases.build(name), class_plan(small))}
    for changed in config_variants.variants(name):
        try:
            model = cases.build(name, {**cases.CASES[name].config, **changed})
        except Exception:  # diffusers refuses the config, in whatever way
            continue
        structure = config_variants.structure(model, _plan(model))
        if not everything and structure in seen:
            continue
        seen.add(structure)
        try:
            given = cases.inputs(model)
            expected = cases.outputs(model, given)
        except Exception:  # likewise
            continue
        yield _Built(name, repr(changed), model, given, expected)


def _plan(model: Any) -> Plan:
    try:
        return class_plan(model)
    except PlanError:
        return {}


def _sharded(built: Sequence[_Built], tp: int, way: str) -> Outcomes:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(rank, tp, Path(folder), built, way) for rank in range(tp)]
        statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
        assert not any(statuses)
        told = [pickle.loads(Path(folder, f"rank-{rank}").read_bytes()) for rank in range(tp)]
    return {
        (each.name, each.changed, tp, way): max(outcomes, key=lambda outcome: (isinstance(outcome, str), outcome))
        for each, *outcomes in zip(built, *told, strict=True)
        if way != "lean" or ENTRIES[each.name].lean
    }


def _fork(rank: int, tp: int, folder: Path, built: Sequence[_Built], way: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        store = dist.FileStore(str(folder / "store"), tp)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=tp, timeout=timedelta(seconds=30))
        outcomes = [_outcome(each, way) for each in built]
        Path(folder, f"rank-{rank}").write_bytes(pickle.dumps(outcomes))
        dist.barrier()  # or a quick rank could leave while others connect
    except BaseException:  # a child must never return into the code of its parent
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _outcome(each: _Built, way: str) -> Outcome:
    if way == "lean" and not ENTRIES[each.name].lean:
        return 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ShardconvWarning)  # a class's own plan raises no doubts
            model = loader.parallelize(each.model, **WAYS[way])
        return small_sets.difference(cases.outputs(model, each.given), each.expected)
    except ShardconvError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
