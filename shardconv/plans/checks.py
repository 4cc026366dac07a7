"""Whether the layers of a plan fit together: what can be seen without running the model.

Asked of every plan, the class's own too: the tests that have shown it right had not every config of the class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..format.cut import Cut
from ..format.plan import Plan, Style
from .catalogue import entry_of, expand
from .catalogue.entry import QUERY_OR_KEY, following, normalized_widths, places_of, refused
from .heads import head_counts, owners, unknown_heads
from .match import Findings, PlannedModule, blocks_attribute, colwise_names, match, says_across_heads

if TYPE_CHECKING:
    from torch import nn

_NORM = ("norm", "ln")  # how names of norms begin


def check_sense(
    model: nn.Module, plan: Plan, modules: Sequence[PlannedModule], tp: int, class_plan: Plan | None, found: Findings
) -> None:
    """What every plan must show: that its layers fit together."""
    is_own = _is_own(model, plan, class_plan)
    _check_fused(model, modules, None if is_own else class_plan, found)
    if not found.issues:
        found.issues += _check_refused(model, modules)
        unpaired = _check_pairs(model, modules)
        found.issues += unpaired
        if tp > 1:
            found.issues += _check_attention(model, modules)
        if not unpaired:
            found.issues += _check_whole(model, modules)
    # What may be meant in a plan that somebody gave shows, in the class's own, a layout that it was not made for.
    (found.issues if is_own else found.warnings).extend(_check_widths(modules))


def _is_own(model: nn.Module, plan: Plan, class_plan: Plan | None) -> bool:
    """Whether the plan is the class's own, lean or not."""
    entry = entry_of(model)
    more = expand(entry.lean, model) if entry else {}
    return class_plan is not None and class_plan == {key: rule for key, rule in plan.items() if more.get(key) != rule}


def _check_fused(model: nn.Module, modules: Sequence[PlannedModule], class_plan: Plan | None, found: Findings) -> None:
    """A layer cut in other blocks than the class itself has for it: warned about, once for each plan key."""
    layers = {key: rule for key, rule in (class_plan or {}).items() if rule.style is not Style.PARAMETER}
    own = {module.name: module.cut for module in match(model, layers, Findings())}
    warned: set[str] = set()
    for module in modules:
        if module.style.is_whole_around:  # its input is whole, so any cut of it is right
            continue
        stored = getattr(model.get_submodule(module.name), blocks_attribute(module.style), None)
        meant = Cut(module.cut.dim, tuple(stored)) if stored else own.get(module.name, module.cut)
        if meant.dim == module.cut.dim and meant != module.cut and module.pattern not in warned:
            warned.add(module.pattern)
            packed = Style.PACKED_COLWISE if meant.dim == 0 else Style.PACKED_ROWWISE
            if module.style.is_packed:
                how, right = f"a layer cut in blocks {list(module.cut.block_sizes)}", f"{list(meant.block_sizes)}"
            else:
                how, right = f"a fused layer cut as {module.style.value}", packed.value
            found.warnings.append(
                f"{module.name}: {how}, so that ranks pair parts of different blocks; {right} is almost certainly meant"
            )


def _check_refused(model: nn.Module, modules: Sequence[PlannedModule]) -> list[str]:
    """Modules of which the catalogue says that this config cannot have them sharded."""
    entry = entry_of(model)
    return [
        f"{name}: {why}; leave it out of the plan"
        for name, why in (refused(entry, model) if entry else {}).items()
        if any(m.name.startswith(f"{name}.") and not m.style.is_whole_around for m in modules)
    ]


def _check_pairs(model: nn.Module, modules: Sequence[PlannedModule]) -> list[str]:
    """Colwise outputs stay sharded until a rowwise module sums them. Each rowwise module takes up the colwise ones in
    the nearest enclosing module that has any, within its block; one left over would never be summed."""
    colwise = [module for module in modules if module.style.is_colwise]
    inside_of = _by_scope(colwise)
    joined = _handed_on(model, colwise)
    issues: dict[str, str] = {}  # by plan key: one sentence for each
    for row in (module for module in modules if module.style.takes_local_input):
        inside = _joined(row, inside_of.get(row.scope, []))
        joined.update(module.name for module in inside)
        if not inside:
            issues.setdefault(
                row.pattern,
                f"{row.name}: {row.style.value}, but nothing in its block is colwise, so its input is whole; use "
                f"{Style.ROWWISE_SPLIT_INPUT.value}",
            )
    for module in colwise:
        if module.name not in joined:
            issues.setdefault(
                module.pattern,
                f"{module.name}: {module.style.value}, but no rowwise module joins its output, so partial results "
                "would be taken for whole ones; plan the projection that follows it",
            )
    return list(issues.values())


def _handed_on(model: nn.Module, colwise: Sequence[PlannedModule]) -> set[str]:
    """Names of the colwise modules whose output a rowwise one elsewhere takes, as the catalogue says."""
    entry = entry_of(model)
    owners_ = {name for pattern in (entry.handed_on if entry else ()) for name, _ in places_of(model, pattern)}
    return {module.name for module in colwise if module.name.rpartition(".")[0] in owners_}


def _check_widths(modules: Sequence[PlannedModule]) -> list[str]:
    """A plain colwise module with several times the features that the rowwise one after it takes is a fused one: gate
    and up, or queries, keys and values. One sentence for each plan key."""
    said: dict[str, str] = {}
    rows = _by_scope([module for module in modules if module.style.takes_local_input])
    for col in (module for module in modules if module.style is Style.COLWISE):
        given = sum(col.cut.block_sizes)
        for row in following(col.name, {row.name: row for row in rows.get(col.scope, [])}):
            taken = sum(row.cut.block_sizes)
            if row.style is Style.ROWWISE and given > taken and given % taken == 0:
                said.setdefault(
                    col.pattern,
                    f"{col.name}: {given} features cut as one block, but {row.name} takes {taken}, so it looks like "
                    f"{given // taken} fused layers; packed_colwise with blocks is almost certainly meant",
                )
    return list(said.values())


def _by_scope(modules: Sequence[PlannedModule]) -> dict[str, list[PlannedModule]]:
    found: dict[str, list[PlannedModule]] = {}
    for module in modules:
        found.setdefault(module.scope, []).append(module)
    return found


def _joined(row: PlannedModule, colwise: Sequence[PlannedModule]) -> list[PlannedModule]:
    """Those of the `colwise` modules of a block whose outputs `row` sums."""
    for ancestor in _ancestors(row):
        inside = [module for module in colwise if module.name.startswith(ancestor)]
        if inside:
            return inside
    return []


def _ancestors(module: PlannedModule) -> Iterator[str]:
    """Prefixes of the enclosing modules, innermost first, up to the block."""
    name = module.name
    while name != module.scope:
        name = name.rpartition(".")[0]
        if len(name) < len(module.scope):
            return
        yield f"{name}." if name else ""


def _check_attention(model: nn.Module, modules: Sequence[PlannedModule]) -> list[str]:
    names = {module.name for module in modules}
    colwise = colwise_names(modules)
    given: dict[str, dict[str, PlannedModule]] = {}  # by what holds it: colwise modules by their own name in it
    for planned in (module for module in modules if module.style.is_colwise):
        owner, _, leaf = planned.name.rpartition(".")
        given.setdefault(owner, {})[leaf] = planned
    issues = [issue for issue in [unknown_heads(model, colwise)] if issue]
    heads = {count for _, count in head_counts(model, colwise)}
    seen: set[str] = set()
    for owner, mine in given.items():
        inputs = [planned for leaf, planned in mine.items() if not QUERY_OR_KEY.isdisjoint(leaf.split("_"))]
        widths = {size for planned in inputs or mine.values() for size in planned.cut.block_sizes}
        for child, module in model.get_submodule(owner).named_children():
            name = f"{owner}.{child}" if owner else child
            if name in names:
                continue
            text = _norm_issue(model, name, module, widths) or _gate_issue(module, heads, widths)
            if text and child not in seen:
                seen.add(child)
                issues.append(f"{name}: {text}")
    return issues


def _check_whole(model: nn.Module, modules: Sequence[PlannedModule]) -> list[str]:
    """Attentions of which a plan names some projections and forgets others; each forgotten name once."""
    names = {module.name for module in modules}
    issues: dict[str, str] = {}
    for owner in owners(colwise_names(modules)):
        for child in _left_out(owner, model.get_submodule(owner), names):
            issues.setdefault(
                child,
                f"{owner}.{child}: not in the plan, while other projections of the same attention are; queries, keys, "
                "values and outputs of one attention are sharded together or not at all",
            )
    return list(issues.values())


def _left_out(owner: str, parent: Any, planned: set[str]) -> list[str]:
    """Projections of an attention, relative to `owner`, that a plan forgot: it names some query, key or value."""
    from torch.nn import Linear

    linears = [name for name, module in parent.named_modules() if isinstance(module, Linear)]
    inputs = [name for name in linears if "." not in name and not QUERY_OR_KEY.isdisjoint(name.split("_"))]
    if not any(f"{owner}.{name}" in planned for name in inputs):
        return []
    outputs = [name for name in linears if "out" in name.partition(".")[0].split("_")]
    return [name for name in inputs + outputs if f"{owner}.{name}" not in planned]


def _norm_issue(model: nn.Module, name: str, module: Any, widths: set[int]) -> str | None:
    words = name.rpartition(".")[2].lower().split("_")
    is_norm = any(word.startswith(_NORM) for word in words) and not QUERY_OR_KEY.isdisjoint(words)
    if not is_norm or "pre" in words:  # a "pre" one is of the projection's input, which is whole
        return None
    stated = normalized_widths(module)
    if not stated.isdisjoint(widths) or (not stated and says_across_heads(model, name)):
        return (
            "a norm across all heads of a sharded projection; a rank would take the statistics of its own heads only, "
            f"which is quietly wrong; plan it as {Style.NORM_ACROSS_HEADS.value}, or leave the attention out"
        )
    return None


def _gate_issue(module: Any, heads: set[int], widths: set[int]) -> str | None:
    from torch.nn import Linear

    if isinstance(module, Linear) and module.out_features in heads - widths:
        return (
            f"one output a head ({module.out_features}) beside sharded projections, and not in the plan; add it as "
            "colwise"
        )
    return None
