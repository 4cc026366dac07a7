"""The configs by which a class of the catalogue may be built, as far as diffusers' sources tell: one key changed at a
time in the class's small case, and the few pairs of keys that only go together.

Booleans are turned round, optional values left out or given, counts of further heads (keys and values, text, audio)
changed, and strings take every literal that the sources compare a variable of the key's name with.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import diffusers
import torch

from shardconv.format.plan import Plan
from shardconv.plans.catalogue import cases

_SHARED = ("attention", "attention_processor", "normalization", "activations", "embeddings")
_CALLED = {"timestep_activation_fn": "act_fn", "dense_moe_strategy": "strategy"}  # how the key's value is called inside
_NO_LAYOUT = {"dtype"}  # of tensors, not of layers
_HEADS = {"num_attention_heads", "num_heads", "n_heads", "dit_heads"}  # of the queries: more of the same

# fmt: off
TOGETHER: Mapping[str, list[dict[str, Any]]] = {
    "AceStepTransformer1DModel": [{"layer_types": ["full_attention", "full_attention"]}],
    "BriaFibo2Transformer2DModel": [{"injection_layer_ids": (0,)}, {"injection_layer_ids": (0, 1)}],
    "CogVideoXTransformer3DModel": [
        {"patch_size_t": 2, "sample_frames": 2, "ofs_embed_dim": 12, "patch_bias": False},
        {"use_rotary_positional_embeddings": False, "use_learned_positional_embeddings": True},
    ],
    "Cosmos3OmniTransformer": [{"action_gen": True, "action_dim": 12}, {"sound_gen": True, "sound_dim": 12}],
    "CosmosTransformer3DModel": [
        {"use_crossattn_projection": True, "crossattn_proj_in_channels": 26, "encoder_hidden_states_channels": 20},
    ],
    "EasyAnimateTransformer3DModel": [{"mmdit_layers": 1}, {"after_norm": True, "activation_fn": "swiglu"}],
    "HeliosTransformer3DModel": [{"is_amplify_history": False, "has_multi_term_memory_patch": False}],
    "HunyuanDiT2DModel": [{"mlp_ratio": 4.5}],
    "Kandinsky6Transformer3DModel": [
        {"model_dim_a": 24, "ff_dim_a": 40, "axes_dims_a": (2, 2, 2)},
        {"ca_rope": True, "cross_gates": True, "fix_modulation": True},
    ],
    "LTX2VideoTransformer3DModel": [
        {"cross_attn_mod": True, "use_prompt_adaln_single": False},
        {"perturbed_attn": True, "gated_attn": False, "audio_gated_attn": False},
        {"rope_type": "split", "activation_fn": "swiglu"},
    ],
    "LatteTransformer3DModel": [
        {"activation_fn": "geglu", "norm_type": "layer_norm", "norm_elementwise_affine": True, "attention_bias": False},
    ],
    "LongCatAudioDiTTransformer": [{"adaln_type": "local", "cross_attn": False}, {"bias": False, "qk_norm": False}],
    "MotifVideoTransformer3DModel": [{"num_decoder_layers": 1}],
    "NucleusMoEImageTransformer2DModel": [
        {"moe_enabled": False, "num_key_value_heads": None}, {"use_grouped_mm": True, "moe_intermediate_dim": 32},
    ],
    "PixArtTransformer2DModel": [
        {"use_additional_conditions": True, "attention_head_dim": 12, "cross_attention_dim": 48},
        {"activation_fn": "geglu", "attention_bias": False},
    ],
    "SD3Transformer2DModel": [{"dual_attention_layers": (0, 1, 2), "qk_norm": None}, {"dual_attention_layers": (2,)}],
    "SanaTransformer2DModel": [{"num_cross_attention_heads": 4, "cross_attention_head_dim": 12}],
    "WanTransformer3DModel": [{"image_dim": None, "added_kv_proj_dim": None}],
    "WanVACETransformer3DModel": [{"image_dim": 20, "added_kv_proj_dim": 48}],
    "ZImageTransformer2DModel": [{"n_kv_heads": 4, "siglip_feat_dim": 20}],
}
# fmt: on


def variants(name: str) -> Iterator[dict[str, Any]]:
    """The keys in which each config of the class `name` differs from its small case; some configs do not build."""
    cls, small = getattr(diffusers, name), cases.CASES[name].config
    for key, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        value = small.get(key, parameter.default)
        seen = [value]
        for other in _others(cls, key, parameter, value) if key not in _NO_LAYOUT else ():
            if not any(other == each and type(other) is type(each) for each in seen):
                seen.append(other)
                yield {key: other}
    yield from TOGETHER.get(name, ())


def _others(cls: type, key: str, parameter: inspect.Parameter, value: Any) -> Iterator[Any]:
    annotation, kinds = str(parameter.annotation), (type(value), type(parameter.default))
    if bool in kinds or "bool" in annotation:
        yield from (True, False)
    elif str in kinds or "str" in annotation:
        yield from (*literals(cls, key), parameter.default, None)
    elif "head" in key and int in kinds and "dim" not in key and key not in _HEADS:
        yield from (2, 4, 8)
    elif value is None:
        yield from (12, 48)
    elif isinstance(value, (tuple, list)) and "layer" in key:
        yield parameter.default
    if parameter.default is None or "None" in annotation or "Optional" in annotation:
        yield None


def literals(cls: type, key: str) -> list[str]:
    """What the sources of the class, and of the classes that it may use, compare a variable called `key` with."""
    used = {each.__module__ for each in vars(sys.modules[cls.__module__]).values() if inspect.isclass(each)}
    modules = {name for name in used if name.startswith("diffusers.models.")}
    modules |= {f"diffusers.models.{name}" for name in _SHARED}
    names = {key, _CALLED.get(key, key)}
    found = {text for module in modules for name in names for text in _compared(module).get(name, ())}
    if key.endswith("act") or "activation" in key:
        found |= importlib.import_module("diffusers.models.activations").ACT2CLS.keys()
    return sorted(found)


@functools.cache
def _compared(module: str) -> dict[str, set[str]]:
    """Variable, attribute or key -> the strings that it is compared with anywhere in `module`."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))):
        if not isinstance(node, ast.Compare):
            continue
        for side in (node.left, *node.comparators):
            for name in _names(side):
                found.setdefault(name, set()).update(*map(_strings, (node.left, *node.comparators)))
    return found


def _names(node: ast.expr) -> set[str]:
    if isinstance(node, ast.Subscript):
        return _strings(node.slice)
    name = getattr(node, "id", getattr(node, "attr", None))
    return {name} if name else set()


def _strings(node: ast.expr) -> set[str]:
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return set().union(*map(_strings, node.elts))
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def structure(model: torch.nn.Module, plan: Plan) -> str:
    """What two configs have in common when a plan has the same work in both: the plan, and of everything that stands in
    a list of blocks the classes, the shapes and whatever else the modules note of themselves."""
    lists = [f"{name}." for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    inside = [
        (name, type(module).__name__, _noted(module), _shapes(module))
        for name, module in model.named_modules()
        if any(name.startswith(prefix) for prefix in lists)
    ]
    return repr((sorted(plan.items()), inside))


def _noted(module: torch.nn.Module) -> list[tuple[str, Any]]:
    plain = (bool, int, str, type(None))
    return sorted((key, value) for key, value in vars(module).items() if key[0] != "_" and isinstance(value, plain))


def _shapes(module: torch.nn.Module) -> list[tuple[str, torch.Size]]:
    return [(key, parameter.shape) for key, parameter in module.named_parameters(recurse=False)]
