"""One class's entry, and how its patterns become an ordinary plan for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan import Plan, Rule, Style

# Blocks of a projection that takes attention output and feed-forward side by side: [out_features, the rest].
OUT_AND_REST = (0,)


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
    refused: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)  # what it lacks -> by config, whether so
    raw: tuple[str, ...] = ()  # layers whose weights the class reads itself, so that no rule can take them
    checked: tuple[str, ...] = ("0.42.1",)  # the diffusers versions it was tested with


def expand(rules: Mapping[str, Rule], model: Any) -> Plan:
    """The rules as a strict plan for `model`: patterns that fit everywhere stay, others become the names they match."""
    plan: dict[str, Rule] = {}
    for pattern, rule in rules.items():
        places = list(places_of(model, pattern))
        present = {name: found for name, found in places if found is not None}
        if rule.style is Style.NORM_ACROSS_HEADS and not all(is_across_heads(model, name) for name in present):
            continue  # in this config the class has it for each head
        exact = {name: _exact(rule, found) for name, found in present.items()}
        if not exact:
            continue
        if len(present) == len(places) and _is_strict(model, pattern) and len(set(exact.values())) == 1:
            plan[pattern] = next(iter(exact.values()))
        else:
            plan |= exact
    return plan


def _exact(rule: Rule, module: Any) -> Rule:
    if rule.blocks != OUT_AND_REST:
        return rule
    return Rule(rule.style, (module.out_features, module.in_features - module.out_features))


def places_of(model: Any, pattern: str) -> Iterator[tuple[str, Any]]:
    """(name, what stands there: a module, a parameter or None) of every place that `pattern` names."""
    yield from _places(model, pattern.split("."), [])


def _places(module: Any, atoms: Sequence[str], path: list[str]) -> Iterator[tuple[str, Any]]:
    if not atoms or module is None:
        yield ".".join([*path, *atoms]), module
    elif atoms[0] == "*":
        for name, child in module._modules.items():
            yield from _places(child, atoms[1:], [*path, name])
    else:
        child = module._modules.get(atoms[0]) if hasattr(module, "_modules") else None
        if child is None and len(atoms) == 1:
            child = module._parameters.get(atoms[0])
        yield from _places(child, atoms[1:], [*path, atoms[0]])


def _is_strict(model: Any, pattern: str) -> bool:
    """Whether diffusers' own rules take the pattern: one `*` at most, over an `nn.ModuleList`."""
    from torch.nn import ModuleList

    before, star, after = pattern.partition("*")
    return not star or ("*" not in after and isinstance(model.get_submodule(before.rstrip(".")), ModuleList))


def is_across_heads(model: Any, name: str) -> bool:
    """Whether the norm `name` goes over as many features as a projection beside it gives."""
    from torch.nn import Linear

    beside = model.get_submodule(name.rpartition(".")[0]).children()
    widths = {module.out_features for module in beside if isinstance(module, Linear)}
    return not normalized_widths(model.get_submodule(name)).isdisjoint(widths)


def normalized_widths(module: Any) -> set[int]:
    """How many elements a norm goes over, as far as it says: by its weight, or as torch and diffusers name it."""
    weight = getattr(module, "weight", None)
    stated = [weight.shape[0]] if weight is not None and weight.ndim == 1 else []
    for attribute in ("normalized_shape", "dim"):
        shape = getattr(module, attribute, None)
        stated += [shape] if isinstance(shape, int) else [shape[-1]] if shape else []
    return set(stated)
