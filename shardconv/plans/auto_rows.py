"""`--plan auto-rows`: a plan for a class that nobody planned.

Every `Linear` keeps its whole input and its whole output and holds some input features only, so nothing that comes
between layers can notice, heads least of all. It saves memory, not work: each layer costs an all-reduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import PlanError
from ..format.plan import Plan, Rule, Style
from .catalogue import entry_of
from .catalogue.entry import places_of

if TYPE_CHECKING:
    from torch import nn

_RULE = Rule(Style.ROWWISE_SPLIT_INPUT)


def auto_rows(model: nn.Module, tp: int) -> Plan:
    """Every plain `Linear` of `model` whose input features `tp` divides, as rowwise_split_input.

    Layers whose weights the class reads past their forward (the catalogue's `raw`) stay whole. Raises `PlanError` when
    there is no such layer.
    """
    from torch.nn import Linear

    entry = entry_of(model)
    raw = {name for pattern in (entry.raw if entry else ()) for name, _ in places_of(model, pattern)}
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is Linear and module.in_features and module.in_features % tp == 0 and name not in raw
    ]
    if not names:
        raise PlanError(f"{type(model).__name__}: tp degree {tp} divides the input of no Linear; choose another degree")
    return _shortened(model, names)


def _shortened(model: nn.Module, names: list[str]) -> Plan:
    """One key for the layers that every block of a list has, the name itself for the others."""
    from torch.nn import ModuleList

    chosen, plan = set(names), {}
    for name in names:
        key = name
        atoms = name.split(".")
        for position in range(1, len(atoms)):
            blocks = model.get_submodule(".".join(atoms[:position]))
            if isinstance(blocks, ModuleList):
                pattern = ".".join([*atoms[:position], "*", *atoms[position + 1 :]])
                if all(place in chosen for place, _ in places_of(model, pattern)):
                    key = pattern
                break
        plan[key] = _RULE
    return plan
