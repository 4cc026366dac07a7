"""What `shardconv plans` prints: each class with its degrees and sizes, from a model on the meta device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..format.plan import Plan, Style, plan_to_json
from ..plans.catalogue.cases import CASES
from ..plans.catalogue.entries import ENTRIES
from ..plans.catalogue.entry import Entry
from ..plans.catalogue.released import RELEASED
from ..plans.choice import class_plan

if TYPE_CHECKING:
    from torch import nn

PARAMETER_NBYTES = 2  # bfloat16
MAX_TP = 8  # degrees up to the ranks of one node


@dataclass(frozen=True, slots=True)
class Row:
    """One class. Shares are of all bytes, 0 to 1; bytes of a rank are at the last of `degrees`."""

    model_class: str
    degrees: tuple[int, ...]
    nbytes: int  # of the whole model
    rank_nbytes: int
    replicated_share: float
    lean_rank_nbytes: int  # as without `--lean` where it has nothing to add
    lean_replicated_share: float
    needs: tuple[str, ...]  # what its attention code needs beside sharded layers


def rows() -> Iterator[Row]:
    """Every class of the catalogue that the installed diffusers has."""
    return map(class_row, class_names())


def class_names() -> list[str]:
    """The classes that `rows` goes over, in its order."""
    from ..libraries.choose import LIBRARIES

    return [name for name in sorted(ENTRIES) if any(library.find(name) for library in LIBRARIES)]


def class_row(name: str) -> Row:
    """One class, by the first released model of it, its default configuration, or else its small case."""
    from ..libraries.choose import model_class

    released = next((each.config for each in RELEASED.values() if each.model_class == name), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside diffusers' own classes
        model = _skeleton(model_class(name), released)
    return row_of(model)


def added_classes() -> int:
    """How many classes have a plan that the catalogue brings, not diffusers."""
    return sum(bool(entry.plan) and entry.library == "diffusers" for entry in ENTRIES.values())


def encoder_classes() -> int:
    """How many classes of transformers have a plan."""
    return sum(entry.library == "transformers" for entry in ENTRIES.values())


def released_models() -> int:
    """How many released models the catalogue has the configuration of."""
    return len(RELEASED)


def _skeleton(cls: Any, config: Mapping[str, Any] | None) -> Any:
    from ..errors import CheckpointError
    from ..libraries.skeleton import skeleton

    try:
        return skeleton(cls, config or {})
    except CheckpointError:  # some arguments have no default
        return skeleton(cls, CASES[cls.__name__].config)


def row_of(model: nn.Module) -> Row:
    """Degrees and sizes of one model under the plan of its class. Raises `PlanError`."""
    from ..errors import PlanError
    from ..plans.resolve import degrees_of

    entry, plan = ENTRIES[type(model).__name__], class_plan(model)
    degrees = degrees_of(model, plan, MAX_TP)
    try:
        lean = class_plan(model, degrees[-1])
    except PlanError:
        lean = plan
    whole = PARAMETER_NBYTES * sum(parameter.numel() for parameter in model.parameters())
    (rank, share), (lean_rank, lean_share) = (_held(model, each, degrees[-1]) for each in (plan, lean))
    return Row(
        type(model).__name__,
        tuple(degrees),
        whole,
        rank,
        share / whole,
        lean_rank,
        lean_share / whole,
        needs(entry, plan),
    )


def _held(model: nn.Module, plan: Plan, tp: int) -> tuple[int, int]:
    """Bytes of one rank, and those of them that every rank holds."""
    from ..plans.resolve import resolve

    cuts = resolve(model, plan, tp).cuts
    sizes = {name: PARAMETER_NBYTES * parameter.numel() for name, parameter in model.named_parameters()}
    whole = sum(nbytes for name, nbytes in sizes.items() if cuts.get(name, (None, None))[1] is None)
    return whole + (sum(sizes.values()) - whole) // tp, whole


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
    from ..errors import UsageError
    from ..format.config import read_config
    from ..libraries.choose import model_class, renamed
    from ..libraries.skeleton import skeleton

    if Path(subject).is_dir():
        config, _ = read_config(Path(subject))
        name = str(config["_class_name"])
    elif subject in CASES:
        name, config = subject, dict(CASES[subject].config)
    else:
        unknown = "no component folder and not in the catalogue; shardconv plans lists it"
        raise UsageError(f"{subject}: {renamed(subject) or unknown}")
    return plan_to_json(class_plan(skeleton(model_class(name, config), config)))
