"""What a model must not be before it is sharded, and what must not be done to it afterwards."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardconv.errors import PlanError, UsageError
from shardconv.libraries.choose import library_of

from ..group.ranks import Ranks

WAY_OUT = "The ordinary checkpoint comes back with: shardconv merge SET OUT"
_REFUSED = ("save_pretrained", "load_lora_adapter", "enable_group_offload", "enable_parallelism")
_SHARDED = "is sharded with tensor parallelism, so it cannot"
_ADAPTER = (
    "have an IP-Adapter, whose attention processors hold projections as wide as all heads; run that model unsharded"
)
# Parts of the names of diffusers' hooks -> what somebody did, and how it goes together with sharding.
_HOOKS: Mapping[str, str] = {
    "group_offloading": "carries an offload hook; load it without offloading",
    "layerwise_casting": "is cast layer by layer; load it without, shard it, then enable_layerwise_casting()",
}


def check_model(model: object) -> None:
    """Raises `UsageError` for what is no model: a pipeline, a compiled model."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise UsageError(
            f"model: expected a model as it was loaded, found one that torch.compile wrapped ({name}); shard it first, "
            "then compile"
        )
    held = getattr(model, "components", None)
    if not isinstance(model, nn.Module) and isinstance(held, Mapping):
        names = [key for key in held if key.startswith("transformer")] or ["transformer"]
        raise UsageError(f"model: expected a model, found a pipeline, {name}; give its {' and its '.join(names)}")
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: expected a diffusers model, found {name}; load one, or use load_model")


def check_plain(model: nn.Module) -> None:
    """Raises `PlanError` for a model whose parameters are not its own plain tensors, or whose modules do not run as
    their class says."""
    name = type(model).__name__
    if getattr(model, "_parallel_config", None) is not None:
        raise PlanError(f"{name}: is sharded already; load it afresh to shard it in another way")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise PlanError(f"{name}: is quantized, quantized weights cannot be cut; load it unquantized")
    issues: dict[str, str] = {}  # by what is said, the first place of each
    cached = getattr(model, "is_cache_enabled", False)
    if cached:
        text = "has a cache enabled; disable_cache() first, shard it, then enable_cache(...) again"
        issues[text] = f"{name}: {text}"
    for path, module in model.named_modules():
        found = _changed(module, cached)
        if found:
            issues.setdefault(found, f"{name}: {path or 'the model'} {found}")
    if issues:
        raise PlanError(*issues.values())
    meta = [path for path, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise PlanError(f"{name}: {meta[0]} is on the meta device; load the weights first")


def _changed(module: nn.Module, cached: bool) -> str | None:
    """What was done to a module that sharding would undo or miss, and what to do instead; None when nothing was. Hooks
    that are not known are those of the cache, if there is one."""
    if hasattr(module, "_hf_hook"):
        return "carries an offload hook; load it without offloading"
    hooks = list(getattr(getattr(module, "_diffusers_hook", None), "hooks", ()))
    if hooks:
        known = next((words for part, words in _HOOKS.items() if part in hooks[0]), None)
        if known or not cached:
            return known or f"carries the hook {hooks[0]!r}; remove it, shard the model, then add it again"
    if hasattr(module, "base_layer"):
        return "is a LoRA layer; fuse or unload the adapter first (fuse_lora)"
    if _is_fused(module):
        return "has its projections fused; unfuse_qkv_projections() first, shard it, then fuse_qkv_projections() again"
    if holds_parameters(getattr(module, "processor", None)):
        kind = type(module.processor).__name__
        return (
            f"has a processor with parameters of its own ({kind}), as IP-Adapters bring, which cannot run sharded; "
            "unload_ip_adapter() first, or run that model unsharded"
        )
    return None


def _is_fused(module: nn.Module) -> bool:
    """Attention that cannot unfuse keeps the mark for ever: its processor tells."""
    if hasattr(module, "unfuse_projections"):
        return bool(getattr(module, "fused_projections", False))
    return type(getattr(module, "processor", None)).__name__.startswith("Fused")


def holds_parameters(processor: object) -> bool:
    """Whether an attention processor has tensors, itself or in what it holds."""
    if isinstance(processor, nn.Module):
        return any(True for _ in (*processor.parameters(), *processor.buffers()))
    return any(map(_is_tensors, vars(processor).values())) if hasattr(processor, "__dict__") else False


def _is_tensors(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_tensors, value))
    if isinstance(value, Mapping):
        return any(map(_is_tensors, value.values()))
    return isinstance(value, torch.Tensor) or (isinstance(value, nn.Module) and holds_parameters(value))


def mark_sharded(model: nn.Module, ranks: Ranks) -> None:
    """Make diffusers' own refusals for a sharded model apply to this one, and add our way out to them."""
    library = library_of(type(model))
    # Refusals speak for an empty model of the class: bound to `model` itself they would be a reference cycle, and its
    # memory would stay until the garbage collector comes by.
    empty = _empty(model)
    library.mark_sharded(model, empty, ranks.size)
    for name in (*(name for name in _REFUSED if name not in library.refused), *library.refused):
        if hasattr(empty, name):
            setattr(model, name, functools.partial(_refused, empty, name))
    if hasattr(empty, "set_attn_processor"):
        holder = _empty(model)
        holder._modules = model._modules  # all that the method looks at
        setattr(model, "set_attn_processor", functools.partial(_set_processors, holder))  # noqa: B010


def _empty(model: nn.Module) -> nn.Module:
    empty = type(model).__new__(type(model))
    nn.Module.__init__(empty)
    return empty


def _refused(empty: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
    """Have diffusers refuse a method on a sharded model, and add our way out to what it says."""
    try:
        if what := library_of(type(empty)).refused.get(name):
            raise ValueError(f"'{type(empty).__name__}' {_SHARDED} {what}.")
        getattr(type(empty), name)(empty, *args, **kwargs)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise type(error)(f"{error} {WAY_OUT}") from error


def _set_processors(holder: nn.Module, processor: Any, *args: Any, **kwargs: Any) -> None:
    """`set_attn_processor` of a sharded model, for processors that hold nothing of their own."""
    given: Iterable[Any] = processor.values() if isinstance(processor, Mapping) else [processor]
    strange = next((each for each in given if holds_parameters(each)), None)
    if strange is not None:
        raise ValueError(
            f"'{type(holder).__name__}' {_SHARDED} take {type(strange).__name__}, a processor with parameters of its "
            f"own, which are as wide as all heads; run that model unsharded. {WAY_OUT}"
        )
    cls: Any = type(holder)
    cls.set_attn_processor(holder, processor, *args, **kwargs)


def refuse_on_pipeline(pipeline: Any) -> None:
    """Refuse what a pipeline would load into its sharded models."""
    for name, what in (("load_lora_weights", _LORA), ("load_ip_adapter", f"{_ADAPTER}.")):
        if hasattr(pipeline, name):
            setattr(pipeline, name, functools.partial(_refuse, what))


_LORA = "have LoRA weights loaded; fuse them into the ordinary checkpoint before converting."


def _refuse(what: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(f"the pipeline {_SHARDED} {what} {WAY_OUT}")
