"""Attention code that divides by a stored head count, class by class.

With sharded projections a rank sees only its own heads. Some classes derive the count from the tensor (nothing to do);
some read it from an attribute, which must then be the local count; and QwenImage derives the head dim from it, so that
changing it would break it. Guessing is therefore never safe. The catalogue says what a class needs; one that is not in
it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .catalogue import entry_of

if TYPE_CHECKING:
    from torch import nn

HEAD_ATTRIBUTES = (
    "heads",
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "kv_heads",
    "num_kv_heads",
    "num_key_value_heads",
)
CONFIG_HEADS = ("num_attention_heads", "num_key_value_heads", "num_kv_heads", "num_attention_kv_heads")


def head_counts(model: nn.Module, colwise: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(where it stands, value) of every head count that the tp degree must divide, when `colwise` layers are cut."""
    if not colwise:
        return
    config = getattr(model, "config", {})
    for key in CONFIG_HEADS:
        value = getattr(config, key, None)
        if isinstance(value, int):
            yield f"config.json {key}", value
    for owner in owners(colwise):
        module = model.get_submodule(owner)
        for attribute in HEAD_ATTRIBUTES:
            value = module.__dict__.get(attribute)
            if type(value) is int and value > 0:
                yield f"{owner}.{attribute}" if owner else attribute, value


def owners(planned: Sequence[str]) -> list[str]:
    """Names of the modules that directly hold a planned one, each once."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in planned))


def local_attributes(model: nn.Module, colwise: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(module name, attribute) of every count that must become local: divided by the tp degree."""
    entry = entry_of(model)
    for owner in owners(colwise) if entry else ():
        module = model.get_submodule(owner)
        for attribute in entry.heads.get(type(module).__name__, ()) if entry else ():
            if type(module.__dict__.get(attribute)) is int:
                yield owner, attribute


def unknown_heads(model: nn.Module, colwise: Sequence[str]) -> str | None:
    """One sentence when an attention stores head counts and the catalogue does not know what its code does with them:
    the model's class is not in it, or its entry does not name the attention's class."""
    name, entry = type(model).__name__, entry_of(model)
    if entry is not None and not entry.heads:
        return None
    for owner in owners(colwise):
        if entry is not None and type(model.get_submodule(owner)).__name__ in entry.heads:
            continue
        stored = [
            attribute
            for attribute in HEAD_ATTRIBUTES
            if type(model.get_submodule(owner).__dict__.get(attribute)) is int
        ]
        if stored:
            return (
                f"{name}: {owner}.{stored[0]} is a head count, and whether the attention code divides by it has not "
                "been checked for this class; a bare plan could run and be wrong, so it is refused (add the class to "
                "shardconv/catalogue once its sharded output is shown to equal the unsharded one)"
            )
    return None
