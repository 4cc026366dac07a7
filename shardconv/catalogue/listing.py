"""What `shardconv plans` prints: each class with its degrees and sizes, from a model on the meta device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plan import Plan, Style, plan_to_json
from .cases import CASES
from .entry import Entry
from .plans import ENTRIES

PARAMETER_NBYTES = 2  # bfloat16
MAX_TP = 8  # degrees up to the ranks of one node


@dataclass(frozen=True, slots=True)
class Row:
    """One class."""

    model_class: str
    degrees: tuple[int, ...]  # up to 16
    nbytes: int  # of the whole model
    rank_nbytes: int  # of one rank at the last of `degrees`
    needs: tuple[str, ...]  # what its attention code needs beside sharded layers


def rows() -> Iterator[Row]:
    """Every class of the catalogue, by its default configuration, or its small case where it has no whole default."""
    from .. import models
    from ..errors import CheckpointError

    for name in sorted(ENTRIES):
        cls = models.model_class(name)
        try:
            model = models.skeleton(cls, {})
        except CheckpointError:
            model = models.skeleton(cls, CASES[name].config)
        yield row_of(model, models.class_plan(model))


def row_of(model: Any, plan: Plan) -> Row:
    """Degrees and sizes of one model under one plan. Raises `PlanError`."""
    from ..resolve import degrees_of, resolve

    degrees = degrees_of(model, plan, MAX_TP)
    cuts = resolve(model, plan, degrees[-1]).cuts
    sizes = {name: math.prod(tensor.shape) for name, tensor in model.named_parameters()}
    local = [size // (degrees[-1] if cuts.get(name, (None, None))[1] else 1) for name, size in sizes.items()]
    name = type(model).__name__
    return Row(
        name,
        tuple(degrees),
        PARAMETER_NBYTES * sum(sizes.values()),
        PARAMETER_NBYTES * sum(local),
        needs(ENTRIES[name], plan),
    )


def needs(entry: Entry, plan: Plan) -> tuple[str, ...]:
    """In words, what the loader does for the class."""
    styles = {rule.style for rule in plan.values()}
    convolutions = any(".conv_" in key for key in plan)
    return tuple(
        word
        for word, applies in (
            ("local head counts", bool(entry.heads)),
            ("norms across heads", Style.NORM_ACROSS_HEADS in styles),
            ("rope tables cut", bool(entry.ropes)),
            ("bare parameters", Style.PARAMETER in styles),
            ("convolutions", convolutions),
        )
        if applies
    )


def plan_of(subject: str) -> Mapping[str, object]:
    """The plan of a class as a plan file states it: for the config of a component folder, or, given a class name, for
    its small case, which has every part. Raises `UsageError`, `CheckpointError`, `PlanError`."""
    from .. import models
    from ..checkpoint import read_config
    from ..errors import UsageError

    if Path(subject).is_dir():
        config, _ = read_config(Path(subject))
        name = str(config["_class_name"])
    elif subject in CASES:
        name, config = subject, dict(CASES[subject].config)
    else:
        raise UsageError(f"{subject}: no component folder and not in the catalogue; shardconv plans lists it")
    return plan_to_json(models.class_plan(models.skeleton(models.model_class(name), config)))
