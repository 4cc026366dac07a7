"""A plan applied to a model: which modules it names, how each parameter is cut, and everything that is wrong with it.

Reads shapes only, so a meta-device model will do. The rules for patterns are those of diffusers 0.42.1
(`hooks/tensor_parallel.py`): at most one `*`, the part before it names an `nn.ModuleList`, a pattern without `*` names
a module of the model itself; blocks without numbers stand on the `Linear` as `_tp_packed_col_blocks` or
`_tp_packed_row_blocks`, as absolute sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .catalogue import entry_of, expand
from .catalogue.entry import is_across_heads, normalized_widths
from .cut import Cut, block_sizes, legal_degrees
from .errors import PlanError
from .heads import head_counts, owners, unknown_heads
from .models import tied_names
from .plan import Plan, Rule, Style

# Parts of names by which diffusers' classes tell norms of queries and keys (norm_q, k_norm, norm_added_q, ln_q) from
# others. Over all heads such a norm needs statistics summed over ranks.
_QUERY_OR_KEY = frozenset({"q", "k", "v", "qk", "query", "key", "value"})
_NORM = ("norm", "ln")


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """One layer that a plan names: a `Linear`, a convolution or a norm across heads."""

    name: str
    pattern: str  # the plan's key
    scope: str  # the block it is in: an element of the outermost `nn.ModuleList`, "" when in none
    style: Style
    cut: Cut  # of the weight


@dataclass(frozen=True, slots=True)
class Resolution:
    """A plan resolved against one model. Parameters that `cuts` lacks are replicated."""

    modules: tuple[PlannedModule, ...]  # in the model's own order; one that stands in several places is there once
    cuts: Mapping[str, tuple[Style, Cut | None]]  # parameter -> style, cut (None: whole on every rank)
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Findings:
    issues: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def resolve(model: Any, plan: Plan, tp: int, class_plan: Plan | None = None) -> Resolution:
    """Resolve `plan` against `model` for `tp` ranks.

    `class_plan` is the plan of the model's own class, if it has one: a plan file that cuts a layer plainly which the
    class packs is warned about. Raises `PlanError` with every fault found.
    """
    found = _Findings()
    layers = {pattern: rule for pattern, rule in plan.items() if rule.style is not Style.PARAMETER}
    modules = _match(model, layers, found)
    parameters = _match_parameters(model, {key: rule for key, rule in plan.items() if key not in layers}, found)
    if not found.issues:
        found.issues += _check_degree(model, modules, parameters, tp)
    if not _is_proved(model, plan):
        _check_sense(model, modules, tp, class_plan, found)
    cuts = {name: spec for module in modules for name, spec in _parameter_cuts(model, module)}
    cuts |= {name: (Style.PARAMETER, cut) for name, cut in parameters.items()}
    found.issues += _check_ties(model, cuts)
    if found.issues:
        raise PlanError(*found.issues)
    unique = {id(model.get_submodule(module.name)): module for module in reversed(modules)}
    return Resolution(tuple(reversed(unique.values())), cuts, tuple(found.warnings))


def _is_proved(model: Any, plan: Plan) -> bool:
    """Whether the plan is the catalogue's own, lean or not, shown by a test to give the unsharded output. What looks
    doubtful in it (projections that share one output layer, say) is meant."""
    entry = entry_of(model)
    if entry is None:
        return False
    own, more = expand(entry.plan, model), expand(entry.lean, model)
    return bool(own) and own == {key: rule for key, rule in plan.items() if more.get(key) != rule}


def _check_sense(
    model: Any, modules: Sequence[PlannedModule], tp: int, class_plan: Plan | None, found: _Findings
) -> None:
    """What a plan nobody has proved must show: that its layers fit together."""
    _check_fused(model, modules, class_plan, found)
    if not found.issues:
        unpaired = _check_pairs(modules)
        found.issues += unpaired
        if tp > 1:
            found.issues += _check_attention(model, modules)
        if not unpaired:
            found.issues += _check_whole(model, modules)
    found.warnings += _check_widths(modules)


def _match_parameters(model: Any, plan: Plan, found: _Findings) -> dict[str, Cut]:
    """Parameter name -> its cut, for the rules that name bare parameters."""
    cuts: dict[str, Cut] = {}
    for pattern, rule in plan.items():
        owners_, _, leaf = pattern.rpartition(".")
        try:
            for name, module in _targets(model, owners_) if owners_ else [("", model)]:
                parameter = module._parameters.get(leaf) if module is not None else None
                cuts[f"{name}.{leaf}" if name else leaf] = _parameter_cut(parameter, rule)
        except ValueError as error:
            found.issues.append(f"plan key {pattern!r}: {error}")
    return cuts


def _parameter_cut(parameter: Any, rule: Rule) -> Cut:
    dim = rule.dim or 0
    if parameter is None or dim >= parameter.ndim:
        raise ValueError(f"expected a parameter with a dim {dim} in every place; correct the key")
    sizes = block_sizes(parameter.shape[dim], rule.blocks or (1,))
    if sizes is None:
        raise ValueError(f"dim {dim} is {parameter.shape[dim]}, blocks {list(rule.blocks or ())} do not divide it")
    return Cut(dim, sizes)


def _match(model: Any, plan: Plan, found: _Findings) -> list[PlannedModule]:
    claimed: dict[int, str] = {}
    modules = []
    for pattern, rule in plan.items():
        try:
            targets = list(_targets(model, pattern))
        except ValueError as error:
            found.issues.append(f"plan key {pattern!r}: {error}")
            continue
        missing = [name for name, module in targets if module is None]
        if missing:
            found.issues.append(
                f"plan key {pattern!r}: matches nothing in {len(missing)} of {len(targets)} places, the first is "
                f"{missing[0]}; correct the key"
            )
            continue
        for name, module in targets:
            if claimed.setdefault(id(module), pattern) != pattern:
                found.issues.append(
                    f"{name}: named by two plan keys, {claimed[id(module)]!r} and {pattern!r}; keep one"
                )
                break
            try:
                modules.append(_planned(model, name, module, pattern, rule))
                _check_norm(model, modules[-1])
            except ValueError as error:
                found.issues.append(f"{name}: {error}{_others(len(targets) - 1, pattern)}")
                break
    order = {name: position for position, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return sorted(modules, key=lambda module: order[module.name])


def _others(nr: int, pattern: str) -> str:
    return f" (likewise {nr} more of {pattern!r})" if nr else ""


def _targets(model: Any, pattern: str) -> Iterator[tuple[str, Any]]:
    """(name, module or None) of each place that `pattern` names."""
    from torch.nn import ModuleList

    atoms = pattern.split(".")
    if pattern.count("*") > 1:
        raise ValueError(f"expected at most one '*', found {pattern.count('*')}; write one key for each list")
    if "*" not in pattern:
        yield pattern, _submodule(model, atoms)
        return
    if "*" not in atoms:
        raise ValueError("expected '*' as a whole name between dots")
    star = atoms.index("*")
    prefix = ".".join(atoms[:star])
    container = _submodule(model, atoms[:star])
    if not isinstance(container, ModuleList):
        kind = "nothing" if container is None else type(container).__name__
        raise ValueError(f"expected an nn.ModuleList before '*', {prefix or 'the model itself'} is {kind}")
    for position, block in enumerate(container):
        yield ".".join([prefix, str(position), *atoms[star + 1 :]]), _submodule(block, atoms[star + 1 :])


def _submodule(module: Any, atoms: Sequence[str]) -> Any:
    for atom in atoms:
        module = module._modules.get(atom) if module is not None else None
    return module


def _scope(model: Any, name: str) -> str:
    """The block that the module `name` is in."""
    from torch.nn import ModuleList

    atoms = name.split(".")
    for length in range(1, len(atoms)):
        if isinstance(_submodule(model, atoms[:length]), ModuleList):
            return ".".join(atoms[: length + 1])
    return ""


def _planned(model: Any, name: str, module: Any, pattern: str, rule: Rule) -> PlannedModule:
    from torch.nn import Conv2d, Linear

    dim = rule.style.dim
    if rule.style is Style.NORM_ACROSS_HEADS:
        widths = normalized_widths(module)
        if len(widths) != 1:
            raise ValueError(f"expected a norm over one dim, found {type(module).__name__}")
        return PlannedModule(name, pattern, _scope(model, name), rule.style, Cut(0, tuple(widths)))
    if isinstance(module, Conv2d):
        if rule.style is Style.ROWWISE_SPLIT_INPUT or (dim == 1 and module.groups > 1):
            raise ValueError(f"a convolution cannot be {rule.style.value}")
    elif not isinstance(module, Linear):
        raise ValueError(
            f"expected an nn.Linear, found {type(module).__name__}; only Linear, convolution and norm layers are cut"
        )
    total = module.weight.shape[dim]
    if total == 0:
        raise ValueError(f"dim {dim} has no elements, nothing can be cut; take it out of the plan")
    return PlannedModule(name, pattern, _scope(model, name), rule.style, Cut(dim, _block_sizes(module, rule, total)))


def _check_norm(model: Any, planned: PlannedModule) -> None:
    """A norm across heads is as wide as a projection beside it; a narrower one is of each head and stays whole."""
    if planned.style is Style.NORM_ACROSS_HEADS and not is_across_heads(model, planned.name):
        raise ValueError("is not as wide as a projection beside it, so it is not across heads; take it out of the plan")


def _block_sizes(module: Any, rule: Rule, total: int) -> tuple[int, ...]:
    if not rule.style.is_packed:
        return (total,)
    if rule.blocks is not None:
        sizes = block_sizes(total, rule.blocks)
        if sizes is None:
            raise ValueError(
                f"dim {rule.style.dim} is {total}, blocks {list(rule.blocks)} have the sum {sum(rule.blocks)}, which "
                "does not divide it; correct the blocks"
            )
        return sizes
    attribute = _blocks_attribute(rule.style)
    stored = getattr(module, attribute, None)
    if not stored:
        raise ValueError(f"{rule.style.value} without blocks, and the Linear carries no {attribute}; give blocks")
    if sum(stored) != total:
        raise ValueError(
            f"{attribute} {list(stored)} have the sum {sum(stored)}, expected dim {rule.style.dim}, {total}"
        )
    return tuple(stored)


def _blocks_attribute(style: Style) -> str:
    return "_tp_packed_col_blocks" if style.dim == 0 else "_tp_packed_row_blocks"


def _parameter_cuts(model: Any, planned: PlannedModule) -> Iterator[tuple[str, tuple[Style, Cut | None]]]:
    """Every stored tensor of a planned module. Cut on dim 0, whatever has the weight's rows is cut with them (bias,
    per-channel scale); cut on dim 1, all but the weight stays whole."""
    module = model.get_submodule(planned.name)
    stored = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if "." not in name}
    rows = sum(planned.cut.block_sizes)
    for name, tensor in stored.items():
        by_rows = planned.cut.dim == 0 and tensor.ndim > 0 and tensor.shape[0] == rows
        yield f"{planned.name}.{name}", (planned.style, planned.cut if by_rows or name == "weight" else None)


def _check_fused(model: Any, modules: Sequence[PlannedModule], class_plan: Plan | None, found: _Findings) -> None:
    """A layer cut in other blocks than the class itself has for it: warned about, once for each plan key."""
    layers = {key: rule for key, rule in (class_plan or {}).items() if rule.style is not Style.PARAMETER}
    own = {module.name: module.cut for module in _match(model, layers, _Findings())}
    warned: set[str] = set()
    for module in modules:
        if module.style is Style.ROWWISE_SPLIT_INPUT:  # its input is whole, so any cut of it is right
            continue
        stored = getattr(model.get_submodule(module.name), _blocks_attribute(module.style), None)
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


def degrees_of(model: Any, plan: Plan, limit: int = 16) -> list[int]:
    """The tp degrees up to `limit` that divide every head count and every block. Raises `PlanError`."""
    resolution = resolve(model, plan, 1)
    heads = [count for _, count in head_counts(model, colwise_names(resolution.modules))]
    sizes = [size for _, cut in resolution.cuts.values() if cut for size in cut.block_sizes]
    return legal_degrees(heads + sizes, limit)


def colwise_names(modules: Sequence[PlannedModule]) -> list[str]:
    return [module.name for module in modules if module.style.is_colwise]


def _check_degree(model: Any, modules: Sequence[PlannedModule], parameters: Mapping[str, Cut], tp: int) -> list[str]:
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


def _check_pairs(modules: Sequence[PlannedModule]) -> list[str]:
    """Colwise outputs stay sharded until a rowwise module sums them. Each rowwise module takes up the colwise ones in
    the nearest enclosing module that has any, within its block; one left over would never be summed."""
    colwise = [module for module in modules if module.style.is_colwise]
    joined: set[str] = set()
    issues: dict[str, str] = {}  # by plan key: one sentence for each
    for row in (module for module in modules if module.style.takes_local_input):
        inside = _joined(row, modules)
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


def _check_widths(modules: Sequence[PlannedModule]) -> list[str]:
    """A plain colwise module with several times the features that the rowwise one after it takes is a fused one: gate
    and up, or queries, keys and values. One sentence for each plan key."""
    said: dict[str, str] = {}
    for row in (module for module in modules if module.style is Style.ROWWISE):
        taken = sum(row.cut.block_sizes)
        for col in _joined(row, modules):
            given = sum(col.cut.block_sizes)
            if col.style is Style.COLWISE and given > taken and given % taken == 0:
                said.setdefault(
                    col.pattern,
                    f"{col.name}: {given} features cut as one block, but {row.name} takes {taken}, so it looks like "
                    f"{given // taken} fused layers; packed_colwise with blocks is almost certainly meant",
                )
    return list(said.values())


def _joined(row: PlannedModule, modules: Sequence[PlannedModule]) -> list[PlannedModule]:
    """The colwise modules whose outputs `row` sums."""
    colwise = [module for module in modules if module.style.is_colwise and module.scope == row.scope]
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


def _check_attention(model: Any, modules: Sequence[PlannedModule]) -> list[str]:
    names = [module.name for module in modules]
    colwise = colwise_names(modules)
    issues = [issue for issue in [unknown_heads(model, colwise)] if issue]
    heads = {count for _, count in head_counts(model, colwise)}
    seen: set[str] = set()
    for owner in owners(colwise):
        parent = model.get_submodule(owner)
        mine = [module for module in modules if module.style.is_colwise and module.name.rpartition(".")[0] == owner]
        widths = {size for module in mine for size in module.cut.block_sizes}
        for child, module in parent.named_children():
            if f"{owner}.{child}" in names:
                continue
            text = _norm_issue(child, module, widths) or _gate_issue(f"{owner}.{child}", module, heads, widths)
            if text and child not in seen:
                seen.add(child)
                issues.append(f"{owner}.{child}: {text}")
    return issues


def _check_whole(model: Any, modules: Sequence[PlannedModule]) -> list[str]:
    """Attentions of which a plan names some projections and forgets others; each forgotten name once."""
    names = [module.name for module in modules]
    issues: dict[str, str] = {}
    for owner in owners(colwise_names(modules)):
        for child in _left_out(owner, model.get_submodule(owner), names):
            issues.setdefault(
                child,
                f"{owner}.{child}: not in the plan, while other projections of the same attention are; queries, keys, "
                "values and outputs of one attention are sharded together or not at all",
            )
    return list(issues.values())


def _left_out(owner: str, parent: Any, planned: Sequence[str]) -> list[str]:
    """Projections of an attention, relative to `owner`, that a plan forgot: it names some query, key or value."""
    from torch.nn import Linear

    linears = [name for name, module in parent.named_modules() if isinstance(module, Linear)]
    inputs = [name for name in linears if "." not in name and not _QUERY_OR_KEY.isdisjoint(name.split("_"))]
    if not any(f"{owner}.{name}" in planned for name in inputs):
        return []
    outputs = [name for name in linears if "out" in name.partition(".")[0].split("_")]
    return [name for name in inputs + outputs if f"{owner}.{name}" not in planned]


def _norm_issue(child: str, module: Any, widths: set[int]) -> str | None:
    words = child.lower().split("_")
    is_norm = any(word.startswith(_NORM) for word in words) and not _QUERY_OR_KEY.isdisjoint(words)
    if "pre" in words:  # of the projection's input, which is whole
        return None
    if is_norm and not normalized_widths(module).isdisjoint(widths):
        return (
            "a norm across all heads of a sharded projection; a rank would take the statistics of its own heads only, "
            f"which is quietly wrong; plan it as {Style.NORM_ACROSS_HEADS.value}, or leave the attention out"
        )
    return None


def _gate_issue(name: str, module: Any, heads: set[int], widths: set[int]) -> str | None:
    from torch.nn import Linear

    if isinstance(module, Linear) and module.out_features in heads - widths:
        return (
            f"one output a head ({module.out_features}) beside sharded projections, and not in the plan; add it as "
            "colwise"
        )
    return None


def _check_ties(model: Any, cuts: Mapping[str, tuple[Style, Cut | None]]) -> list[str]:
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
