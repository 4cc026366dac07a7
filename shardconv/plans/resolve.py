"""A plan applied to a model: which modules it names, how each parameter is cut, and everything that is wrong with it.

Reads shapes only, so a meta-device model will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import PlanError
from ..format.cut import Cut, legal_degrees
from ..format.plan import Plan, Style
from ..libraries.skeleton import tied_names
from .checks import check_sense
from .heads import head_counts
from .match import Findings, PlannedModule, colwise_names, match, match_parameters

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Resolution:
    """A plan resolved against one model. Parameters that `cuts` lacks are replicated."""

    modules: tuple[PlannedModule, ...]  # in the model's own order; one that stands in several places is there once
    cuts: Mapping[str, tuple[Style, Cut | None]]  # parameter -> style, cut (None: whole on every rank)
    warnings: tuple[str, ...]


def resolve(model: nn.Module, plan: Plan, tp: int, class_plan: Plan | None = None) -> Resolution:
    """Resolve `plan` against `model` for `tp` ranks.

    `class_plan` is the plan of the model's own class, if it has one: another plan that cuts a layer plainly which the
    class packs is warned about. Raises `PlanError` with every fault found.
    """
    found = Findings()
    layers = {pattern: rule for pattern, rule in plan.items() if rule.style is not Style.PARAMETER}
    modules = match(model, layers, found)
    parameters = match_parameters(model, {key: rule for key, rule in plan.items() if key not in layers}, found)
    if not found.issues:
        found.issues += _check_degree(model, modules, parameters, tp)
    check_sense(model, plan, modules, tp, class_plan, found)
    cuts = {name: spec for module in modules for name, spec in _parameter_cuts(model, module)}
    cuts |= {name: (Style.PARAMETER, cut) for name, cut in parameters.items()}
    found.issues += _check_ties(model, cuts)
    if found.issues:
        raise PlanError(*found.issues)
    unique = {id(model.get_submodule(module.name)): module for module in reversed(modules)}
    return Resolution(tuple(reversed(unique.values())), cuts, tuple(found.warnings))


def _parameter_cuts(model: nn.Module, planned: PlannedModule) -> Iterator[tuple[str, tuple[Style, Cut | None]]]:
    """Every stored tensor of a planned module. Cut on dim 0, whatever has the weight's rows is cut with them (bias,
    per-channel scale); cut on dim 1, all but the weight stays whole."""
    module = model.get_submodule(planned.name)
    stored = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if "." not in name}
    rows = sum(planned.cut.block_sizes)
    for name, tensor in stored.items():
        by_rows = planned.cut.dim == 0 and tensor.ndim > 0 and tensor.shape[0] == rows
        yield f"{planned.name}.{name}", (planned.style, planned.cut if by_rows or name == "weight" else None)


def degrees_of(model: nn.Module, plan: Plan, limit: int = 16) -> list[int]:
    """The tp degrees up to `limit` that divide every head count and every block. Raises `PlanError`."""
    resolution = resolve(model, plan, 1)
    heads = [count for _, count in head_counts(model, colwise_names(resolution.modules))]
    sizes = [size for _, cut in resolution.cuts.values() if cut for size in cut.block_sizes]
    return legal_degrees(heads + sizes, limit)


def _check_degree(
    model: nn.Module, modules: Sequence[PlannedModule], parameters: Mapping[str, Cut], tp: int
) -> list[str]:
    counts = list(head_counts(model, colwise_names(modules)))
    cuts = [(f"{module.name}.weight", module.cut) for module in modules] + list(parameters.items())
    sizes = [size for _, cut in cuts for size in cut.block_sizes]
    legal = ", ".join(map(str, legal_degrees([count for _, count in counts] + sizes)))
    # One sentence for each different reason, naming the first place: a large model has hundreds of places.
    heads: dict[int, list[str]] = {}
    for where, count in counts:
        if count % tp:
            heads.setdefault(count, []).append(where)
    blocks: dict[str, list[str]] = {}
    for name, cut in cuts:
        if any(size % tp for size in cut.block_sizes):
            blocks.setdefault(_indivisible(cut, tp), []).append(name)
    return [
        f"{places[0]}: {count} heads, not divisible by tp degree {tp}; use {legal}" for count, places in heads.items()
    ] + [
        f"{names[0]}: {what}, not divisible by tp degree {tp}; use {legal}"
        + (f" (likewise {len(names) - 1} more layers)" if len(names) > 1 else "")
        for what, names in blocks.items()
    ]


def _indivisible(cut: Cut, tp: int) -> str:
    if len(cut.block_sizes) == 1:
        return f"dim {cut.dim} is {cut.block_sizes[0]}"
    position = next(i for i, size in enumerate(cut.block_sizes) if size % tp)
    return f"dim {cut.dim} is packed in blocks {list(cut.block_sizes)}, block {position} is {cut.block_sizes[position]}"


def _check_ties(model: nn.Module, cuts: Mapping[str, tuple[Style, Cut | None]]) -> list[str]:
    issues = []
    for group in tied_names(model):
        ways = {cuts.get(name) for name in group}
        if len(ways) > 1:
            planned = next(name for name in group if name in cuts)
            other = next(name for name in group if cuts.get(name) != cuts[planned])
            issues.append(
                f"{planned}: tied to {other}, which the plan does not cut in the same way; plan both or neither"
            )
    return issues
