"""The plan of a model's class, and whether it was checked with this version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..format.plan import AUTO_ROWS, Plan, PlanChoice, parse_plan
from ..libraries.choose import library_named, library_of, version_of
from .auto_rows import auto_rows
from .catalogue import ENTRIES, entry_of, expand
from .catalogue.entry import places_of, refused

if TYPE_CHECKING:
    from torch import nn


def plan_of(model: nn.Module, choice: PlanChoice, tp: int) -> Plan:
    """The plan that `choice` names for `model` at a tp degree. Raises `PlanError` where there is none."""
    if choice.given is not None:
        return choice.given
    if choice.kind == AUTO_ROWS:
        return auto_rows(model, tp)
    return class_plan(model, tp if choice.kind == "lean" else None)


def class_plan(model: nn.Module, lean_for: int | None = None) -> Plan:
    """The plan of the model's class: its `_tp_plan`, else the catalogue's.

    `lean_for`: a tp degree for which the catalogue's additions for memory are wanted too; one that the degree does not
    divide is left out. Raises `PlanError` for a class that has no plan, or nothing to add.
    """
    plan = _own_plan(model)
    if lean_for is None:
        return plan
    entry = entry_of(model)
    more = expand(entry.lean, model) if entry else {}
    if not more:
        raise PlanError(f"{type(model).__name__}: its plan leaves nothing that could be cut for memory; drop --lean")
    fitting = {key for key in more if all(module.in_features % lean_for == 0 for _, module in places_of(model, key))}
    return {**plan, **{key: rule for key, rule in more.items() if key in fitting}}


def _own_plan(model: nn.Module) -> Plan:
    name = type(model).__name__
    raw = library_of(type(model)).own_plan(type(model))
    if raw:
        return parse_plan(raw, f"{name}._tp_plan")
    entry = entry_of(model)
    reasons = dict.fromkeys(refused(entry, model).values()) if entry else ()
    if reasons:
        raise PlanError(*(f"{name}: {why}; give a plan that leaves it whole with --plan FILE" for why in reasons))
    plan = expand(entry.plan, model) if entry else None
    if not plan:
        raise PlanError(
            f"{name}: has no _tp_plan in {version_of(type(model))} and is not in the catalogue "
            "(shardconv plans lists it); give a plan with --plan FILE"
        )
    return plan


def version_warning(model: nn.Module) -> str | None:
    """One sentence when the class's plan is the catalogue's and was checked with other versions of its library only."""
    entry, library = entry_of(model), library_of(type(model))
    if entry is None or not entry.plan or library.own_plan(type(model)) or library.version() in entry.checked:
        return None
    return (
        f"{type(model).__name__}: its plan was checked with {library.name} {', '.join(entry.checked)}, this is "
        f"{library.version()}; run: shardconv check {type(model).__name__} --tp 2"
    )


def other_plan(model: nn.Module) -> Plan | None:
    """The class's own plan, beside a plan that somebody gave; None when there is none that we understand."""
    try:
        return class_plan(model)
    except PlanError:
        return None


def may_be_cut(library: str, name: str) -> bool:
    """Whether a component of model_index.json can have a plan: told without importing its library."""
    known = library_named(library)
    return known is not None and (known.has_plans or (name in ENTRIES and ENTRIES[name].library == library))


def has_plan(library: str, name: str, config: Mapping[str, Any] | None = None) -> bool | None:
    """Whether a pipeline component (`library`, class name of model_index.json, its config) is a model that has a plan;
    None when it is no model of a library that we know."""
    known = library_named(library)
    if known is None or not may_be_cut(library, name):
        return None
    if not known.has_plans:  # the catalogue alone has them
        return True
    if known.find(name) is None:
        return None
    cls = known.current(name, config or {})
    return bool(known.own_plan(cls)) or (cls.__name__ in ENTRIES and bool(ENTRIES[cls.__name__].plan))
