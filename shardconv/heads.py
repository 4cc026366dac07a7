"""Attention code that divides by a stored head count, class by class.

With sharded projections a rank sees only its own heads. Some classes derive the count from the tensor (nothing to do);
some read it from an attribute, which must then be the local count; and QwenImage derives the head dim from it, so that
changing it would break it. Guessing is therefore never safe: PixArt, Latte, Allegro, Sana and SD3 run without any error
when the count is wrong and return wrong numbers. A class that is not listed here is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Model class -> (attention class -> attributes that become local: divided by the tp degree). Read in diffusers 0.42.1.
LOCAL_HEADS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ChromaTransformer2DModel": {},
    "FluxTransformer2DModel": {},
    "Flux2Transformer2DModel": {},
    "QwenImageTransformer2DModel": {},
    "QwenImage21Transformer2DModel": {},
    "MiniMaxH3Transformer3DModel": {"MiniMaxH3Attention": ("heads",)},
}

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


def head_counts(model: Any, planned: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(where it stands, value) of every head count that the tp degree must divide."""
    config = getattr(model, "config", {})
    for key in CONFIG_HEADS:
        value = config.get(key)
        if isinstance(value, int):
            yield f"config.json {key}", value
    for owner in owners(planned):
        module = model.get_submodule(owner)
        for attribute in HEAD_ATTRIBUTES:
            value = module.__dict__.get(attribute)
            if type(value) is int and value > 0:
                yield f"{owner}.{attribute}" if owner else attribute, value


def owners(planned: Sequence[str]) -> list[str]:
    """Names of the modules that directly hold a planned one, each once."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in planned))


def local_attributes(model: Any, planned: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(module name, attribute) of every head count that must become local."""
    table = LOCAL_HEADS.get(type(model).__name__, {})
    for owner in owners(planned):
        for attribute in table.get(type(model.get_submodule(owner)).__name__, ()):
            yield owner, attribute


def unknown_heads(model: Any, planned: Sequence[str]) -> str | None:
    """One sentence when the model's class is not listed and its attention stores head counts."""
    name = type(model).__name__
    if name in LOCAL_HEADS:
        return None
    for owner in owners(planned):
        stored = [
            attribute
            for attribute in HEAD_ATTRIBUTES
            if type(model.get_submodule(owner).__dict__.get(attribute)) is int
        ]
        if stored:
            return (
                f"{name}: {owner}.{stored[0]} is a head count, and whether the attention code divides by it has not "
                "been checked for this class; a bare plan could run and be wrong, so it is refused (add the class to "
                "shardconv/heads.py once its sharded output is shown to equal the unsharded one)"
            )
    return None
