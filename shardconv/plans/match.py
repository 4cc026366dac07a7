"""The patterns of a plan against the modules of a model: which layers they name, and how each is cut.

The rules for patterns are those of diffusers 0.42.1 (`hooks/tensor_parallel.py`): at most one `*`, the part before it
names an `nn.ModuleList`, a pattern without `*` names a module of the model itself; blocks without numbers stand on the
`Linear` as `_tp_packed_col_blocks` or `_tp_packed_row_blocks`, as absolute sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..format.cut import Cut, block_sizes
from ..format.plan import Plan, Rule, Style
from .catalogue import entry_of
from .catalogue.entry import is_across_heads, normalized_widths, places_of, widths_beside

if TYPE_CHECKING:
    from torch import nn

_NORMS = ("RMSNorm", "LayerNorm", "LpNorm")  # torch's and diffusers': those whose statistics ranks can sum


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """One layer that a plan names: a `Linear`, a convolution or a norm across heads."""

    name: str
    pattern: str  # the plan's key
    scope: str  # the block it is in: an element of the outermost `nn.ModuleList`, "" when in none
    style: Style
    cut: Cut  # of the weight


@dataclass(slots=True)
class Findings:
    """What is wrong with a plan, and what is doubtful: one sentence each."""

    issues: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def match_parameters(model: nn.Module, plan: Plan, found: Findings) -> dict[str, Cut]:
    """Parameter name -> its cut, for the rules that name bare parameters."""
    cuts: dict[str, Cut] = {}
    for pattern, rule in plan.items():
        owners_, _, leaf = pattern.rpartition(".")
        try:
            for name, module in _targets(model, owners_) if owners_ else [("", model)]:
                parameter = dict(module.named_parameters(recurse=False)).get(leaf) if module is not None else None
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


def match(model: nn.Module, plan: Plan, found: Findings) -> list[PlannedModule]:
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


def colwise_names(modules: Sequence[PlannedModule]) -> list[str]:
    """Names of the modules whose output stays sharded."""
    return [module.name for module in modules if module.style.is_colwise]


def _others(num: int, pattern: str) -> str:
    return f" (likewise {num} more of {pattern!r})" if num else ""


def _targets(model: nn.Module, pattern: str) -> Iterator[tuple[str, Any]]:
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
        module = dict(module.named_children()).get(atom) if module is not None else None
    return module


def _scope(model: nn.Module, name: str) -> str:
    """The block that the module `name` is in."""
    from torch.nn import ModuleList

    atoms = name.split(".")
    for length in range(1, len(atoms)):
        if isinstance(_submodule(model, atoms[:length]), ModuleList):
            return ".".join(atoms[: length + 1])
    return ""


def _planned(model: nn.Module, name: str, module: Any, pattern: str, rule: Rule) -> PlannedModule:
    from torch.nn import Conv2d, Embedding, Linear

    dim = rule.style.dim
    if rule.style is Style.NORM_ACROSS_HEADS:
        widths = normalized_widths(module) or widths_beside(model, name)
        if type(module).__name__ not in _NORMS or len(widths) != 1:
            raise ValueError(f"expected a norm over one dim, found {type(module).__name__}")
        return PlannedModule(name, pattern, _scope(model, name), rule.style, Cut(0, tuple(widths)))
    if rule.style is Style.VOCABULARY:
        if not isinstance(module, Embedding):
            raise ValueError(f"expected an nn.Embedding, found {type(module).__name__}")
    elif isinstance(module, Conv2d):
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


def _check_norm(model: nn.Module, planned: PlannedModule) -> None:
    """A norm across heads is as wide as a projection beside it; a narrower one is of each head and stays whole."""
    if planned.style is not Style.NORM_ACROSS_HEADS:
        return
    if not is_across_heads(model, planned.name):
        raise ValueError("is not as wide as a projection beside it, so it is not across heads; take it out of the plan")
    if not normalized_widths(model.get_submodule(planned.name)) and not says_across_heads(model, planned.name):
        raise ValueError("does not say how wide it is, so it may be of each head; leave the attention out of the plan")


def says_across_heads(model: nn.Module, name: str) -> bool:
    """Whether the catalogue has the norm `name`, which states no width itself, across all heads."""
    entry = entry_of(model)
    rules = {} if entry is None else {key: r for key, r in entry.plan.items() if r.style is Style.NORM_ACROSS_HEADS}
    return any(name == place for pattern in rules for place, _ in places_of(model, pattern))


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
    attribute = blocks_attribute(rule.style)
    stored = getattr(module, attribute, None)
    if not stored:
        raise ValueError(f"{rule.style.value} without blocks, and the Linear carries no {attribute}; give blocks")
    if sum(stored) != total:
        raise ValueError(
            f"{attribute} {list(stored)} have the sum {sum(stored)}, expected dim {rule.style.dim}, {total}"
        )
    return tuple(stored)


def blocks_attribute(style: Style) -> str:
    return "_tp_packed_col_blocks" if style.dim == 0 else "_tp_packed_row_blocks"
