"""One class's entry, and how its patterns become an ordinary plan for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import PlanError
from ...format.plan import Plan, Rule, Style

if TYPE_CHECKING:
    from torch import nn

# Blocks that the model tells, not the catalogue. Of a projection that takes attention output and feed-forward side by
# side: [out_features, the rest]. Of one that gives gate and up, or queries, keys and values, or nothing of the kind: as
# many equal parts as make one part what the layer that follows it takes.
OUT_AND_REST = (0,)
AS_TAKEN = (-1,)

# The input layer of diffusers' `FeedForward`, and how many parts it gives by the activation that holds it.
_FEED_FORWARD_INPUT = "net.0.proj"
_ACTIVATIONS = {"GELU": 1, "ApproximateGELU": 1, "LinearActivation": 1, "GEGLU": 2, "SwiGLU": 2}

# Parts of names by which diffusers' classes tell norms and projections of queries and keys (norm_q, k_norm, ln_q, to_k)
# from others.
QUERY_OR_KEY = frozenset({"q", "k", "v", "qk", "query", "key", "value"})


@dataclass(frozen=True, slots=True)
class Refused:
    """A module that, as some configs build it, must stay whole."""

    why: str
    pattern: str
    applies: Callable[[Any], bool]  # to the module that stands there


@dataclass(frozen=True, slots=True)
class Entry:
    """What sharding one model class takes.

    Patterns are looser than in a plan: any number of `*`, each one name of any container; what is absent or None in
    some blocks, or in some configs, is passed over.
    """

    plan: Mapping[str, Rule] = field(default_factory=dict)  # empty: the class has a `_tp_plan` of its own
    heads: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # module class -> attributes that become local, if any
    config: tuple[str, ...] = ()  # head counts in the config that pipelines read, to size caches: local too
    ropes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # module -> arguments that span all heads
    summed: tuple[str, ...] = ()  # modules with cut parameters of their own, whose output is a part of a sum
    lean: Mapping[str, Rule] = field(default_factory=dict)  # more to cut, for memory: modulation and embedders
    refused: tuple[Refused, ...] = ()  # what no plan can shard
    handed_on: tuple[str, ...] = ()  # modules without an output layer: another one's takes what they give
    raw: tuple[str, ...] = ()  # layers whose weights the class reads itself, so that no rule can take them
    checked: tuple[str, ...] = ("0.42.1",)  # the versions of its library it was tested with
    library: str = "diffusers"


def expand(rules: Mapping[str, Rule], model: nn.Module) -> Plan:
    """The rules as a strict plan for `model`: patterns that fit everywhere stay, others become the names they match.

    What the model itself tells is read from it: blocks, and which norms and parameters are not over all heads.
    Raises `PlanError`, every layer named whose layout is none that the rule was proved for.
    """
    places = {pattern: list(places_of(model, pattern)) for pattern in rules}
    taken = {
        name: tuple(_taken(rules[pattern], module))
        for pattern, found in places.items()
        if rules[pattern].style.takes_local_input
        for name, module in found
        if module is not None
    }
    plan: dict[str, Rule] = {}
    issues: list[str] = []
    for pattern, rule in rules.items():
        exact: dict[str, Rule] = {}
        for name, module in places[pattern]:
            try:
                if module is not None and _is_cut(rule, name, module, model):
                    exact[name] = _exact(rule, name, module, model, taken)
            except ValueError as error:
                issues.append(f"{type(model).__name__}: {name}: {error}")
        if exact and len(exact) == len(places[pattern]) and _is_strict(model, pattern) and len({*exact.values()}) == 1:
            plan[pattern] = next(iter(exact.values()))
        else:
            plan |= exact
    if issues:
        raise PlanError(*issues)
    return plan


def _is_cut(rule: Rule, name: str, module: Any, model: nn.Module) -> bool:
    """Whether the rule holds in this config: a norm may be of each head, a parameter one value for all heads."""
    if rule.style is Style.NORM_ACROSS_HEADS:
        return is_across_heads(model, name)
    return rule.style is not Style.PARAMETER or bool(module.shape[rule.dim or 0] > 1)


def _exact(rule: Rule, name: str, module: Any, model: nn.Module, taken: Mapping[str, tuple[int, ...]]) -> Rule:
    """The rule with its blocks, where the model tells them. Raises `ValueError` when it tells nothing that is known."""
    if rule.blocks == OUT_AND_REST:
        return Rule(rule.style, tuple(_taken(rule, module)))
    if rule.blocks != AS_TAKEN:
        return rule
    given, widths = module.weight.shape[0], {each[-1] for each in following(name, taken)}
    part = widths.pop() if len(widths) == 1 else 0
    parts = given // part if part and given % part == 0 else 0
    owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
    if not parts or (name.endswith(_FEED_FORWARD_INPUT) and parts != _ACTIVATIONS.get(owner)):
        raise ValueError(
            f"{owner} gives {given} features and the layer after it takes {part}; a layout that no test has proved is "
            "not sharded; give a plan with --plan FILE, or auto-rows"
        )
    return Rule(rule.style, (1,) * parts) if parts > 1 else Rule(Style.COLWISE)


def _taken(rule: Rule, module: Any) -> Iterator[int]:
    """The widths that a rowwise layer takes, as blocks."""
    given, total = module.weight.shape[:2]
    yield from (given, total - given) if rule.blocks == OUT_AND_REST else (total,)


def following(name: str, rows: Mapping[str, Any]) -> list[Any]:
    """What `rows` has for the layers that take the output of the layer `name`: those beside it, else those within the
    module that it is in, else those beside that module, and so on outwards."""
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        prefix = f"{owner}." if owner else ""
        inside = [row for row in rows if row.startswith(prefix)]
        beside = [row for row in inside if "." not in row[len(prefix) :]]
        if inside:
            return [rows[row] for row in beside or inside]
    return []


def refused(entry: Entry, model: nn.Module) -> dict[str, str]:
    """Module -> why, of every module of `model` that must stay whole."""
    return {
        name: each.why
        for each in entry.refused
        for name, module in places_of(model, each.pattern)
        if module is not None and each.applies(module)
    }


def places_of(model: nn.Module, pattern: str) -> Iterator[tuple[str, Any]]:
    """(name, what stands there: a module, a parameter or None) of every place that `pattern` names."""
    yield from _places(model, pattern.split("."), [])


def _places(module: Any, atoms: Sequence[str], path: list[str]) -> Iterator[tuple[str, Any]]:
    if not atoms or module is None:
        yield ".".join([*path, *atoms]), module
    elif atoms[0] == "*":
        for name, child in module.named_children():
            yield from _places(child, atoms[1:], [*path, name])
    else:
        child = dict(module.named_children()).get(atoms[0]) if hasattr(module, "named_children") else None
        if child is None and len(atoms) == 1:
            child = dict(module.named_parameters(recurse=False)).get(atoms[0])
        yield from _places(child, atoms[1:], [*path, atoms[0]])


def _is_strict(model: nn.Module, pattern: str) -> bool:
    """Whether diffusers' own rules take the pattern: one `*` at most, over an `nn.ModuleList`."""
    from torch.nn import ModuleList

    before, star, after = pattern.partition("*")
    return not star or ("*" not in after and isinstance(model.get_submodule(before.rstrip(".")), ModuleList))


def is_across_heads(model: nn.Module, name: str) -> bool:
    """Whether the norm `name` goes over as many features as a projection beside it gives. One that states no width goes
    over whatever it is given, which is what the class's entry says."""
    stated = normalized_widths(model.get_submodule(name))
    return not stated.isdisjoint(widths_beside(model, name)) if stated else True


def widths_beside(model: nn.Module, name: str) -> set[int]:
    """How many features the projections of queries, keys and values beside the module `name` give."""
    from torch.nn import Linear

    beside = dict(model.get_submodule(name.rpartition(".")[0]).named_children())
    linears = {child: module.out_features for child, module in beside.items() if isinstance(module, Linear)}
    mine = {width for child, width in linears.items() if not QUERY_OR_KEY.isdisjoint(child.split("_"))}
    return mine or set(linears.values())


def normalized_widths(module: Any) -> set[int]:
    """How many elements a norm goes over, as far as it says: by its weight, or as torch and diffusers name it."""
    weight = getattr(module, "weight", None)
    stated = [weight.shape[0]] if weight is not None and weight.ndim == 1 else []
    for attribute in ("normalized_shape", "dim"):
        shape = getattr(module, attribute, None)
        stated += [shape] if isinstance(shape, int) else [shape[-1]] if shape else []
    return {width for width in stated if width > 0}  # `LpNorm.dim` is -1, the last
