"""`shardconv check`: is a plan right? A small model of the class, sharded and unsharded, on CPU ranks, in float32."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..format.config import read_config
from ..format.plan import OWN, PlanChoice
from ..libraries.choose import model_class, renamed
from ..plans.catalogue.cases import CASES
from ..system.children import ranks_failed, run_together

TOLERANCE = 1e-5  # largest difference of an output, relative to the largest value in it
_LAYERS = re.compile(r"layer|blocks|depth$|capacity_factors")  # config keys that say how many layers there are
FEW = 2  # layers that are left of a real config
COMMAND = (sys.executable, "-m", "shardconv.trial.check_ranks")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the sharded model departs from the unsharded one."""

    layer: str
    difference: float  # largest, relative to the largest value of the unsharded output


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found."""

    model_class: str
    tp: int
    difference: float | None  # of the outputs, the worst rank's; None when the sharded model did not run
    issues: tuple[str, ...]  # why it did not run
    layers: tuple[Difference, ...]  # the first that differ, in the order in which they run

    @property
    def is_right(self) -> bool:
        """Whether the outputs agree on every rank."""
        return self.difference is not None and self.difference <= TOLERANCE


def check(subject: str, tp: int, choice: PlanChoice = OWN) -> Verdict:
    """Compare sharded with unsharded output for `subject`: a class name, or a component folder whose config is taken
    with few layers and random weights; cut by the plan that `choice` names.

    Raises `UsageError` for a class without a case, `CheckpointError` for a folder that is none, `RanksFailed` when a
    rank's process dies.
    """
    name, config = _subject(subject)
    if tp < 2:
        raise UsageError(f"--tp: expected 2 ranks or more, found {tp}")
    with tempfile.TemporaryDirectory(prefix="shardconv-check-") as folder:
        job = {"model_class": name, "config": config, "tp": tp, "choice": choice.to_json()}
        Path(folder, "job.json").write_text(json.dumps(job))
        report = _run(Path(folder))
    layers = tuple(Difference(layer["layer"], layer["difference"]) for layer in report["layers"])
    return Verdict(name, tp, report["difference"], tuple(report["issues"]), layers)


def _subject(subject: str) -> tuple[str, Mapping[str, Any] | None]:
    if not Path(subject).is_dir():
        name, config = subject, None
    else:
        config, _ = read_config(Path(subject))
        name = str(config["_class_name"])
    if name not in CASES and config is not None:
        name = str(model_class(name, config).__name__)
    if name not in CASES:
        unknown = (
            "no folder, and no class whose inputs are known; shardconv plans lists the classes, "
            "shardconv/plans/catalogue/cases has their inputs"
        )
        raise UsageError(f"{subject}: {renamed(name) or unknown}")
    return name, None if config is None else _few_layers(config, CASES[name].config)


def _few_layers(config: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """The config with as many layers as the small case has, or fewer; lists of layers stay that name none but those."""
    result = {key: value for key, value in small.items() if _LAYERS.search(key)}
    num = max((value for value in result.values() if type(value) is int), default=FEW)
    for key, value in config.items():
        if key.startswith("_"):
            continue
        if not _LAYERS.search(key):
            result[key] = value
        elif type(value) is int:
            result[key] = min(value, small.get(key, FEW))
        elif isinstance(value, (list, tuple)) and all(type(each) is int and each < num for each in value):
            result[key] = value
    return result


def _run(folder: Path) -> dict[str, Any]:
    run_together("check", [[*COMMAND, str(folder)]], folder)
    report = dict(json.loads((folder / "report.json").read_text()))
    if "died" in report:
        rank, code = report["died"]
        raise ranks_failed("check", f"rank {rank}", code, folder / f"rank-{rank}.said")
    return report
