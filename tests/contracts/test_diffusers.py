"""What we use of diffusers that it does not promise."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
from contracts import Name, found
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models import activations, modeling_utils
from diffusers.quantizers import base as quantizers_base
from torch import nn

from shardconv.format import plan
from shardconv.libraries.skeleton import skeleton
from shardconv.plans.catalogue import ENTRIES, cases
from shardconv.plans.catalogue.entry import _ACTIVATIONS
from shardconv.plans.choice import has_plan

LIBRARY, REFUSALS, NORMS = "shardconv/libraries/diffusers.py", "loader/layers/refusals.py", "loader/layers/norms.py"
PIPELINE, CHOICE, PLAN = "loader/pipeline.py", "shardconv/plans/choice.py", "shardconv/format/plan.py"
MODEL = "diffusers.FluxTransformer2DModel"  # one with all the mixins that a sharded model may have
NAMES = [
    Name("diffusers.ModelMixin._tp_plan", CHOICE),
    Name("diffusers.ModelMixin._keep_in_fp32_modules", LIBRARY),
    Name("diffusers.ModelMixin._keys_to_ignore_on_load_unexpected", LIBRARY),
    Name("diffusers.ModelMixin.from_config", LIBRARY),
    Name("diffusers.models.model_loading_utils._CLASS_REMAPPING_DICT", LIBRARY),
    Name("diffusers.hooks.tensor_parallel.PackedColwiseParallel", PLAN),
    Name("diffusers.hooks.tensor_parallel.PackedRowwiseParallel", PLAN),
    Name("diffusers.ModelMixin._parallel_config", REFUSALS),
    Name("diffusers.models._modeling_parallel.ParallelConfig", LIBRARY, ("tensor_parallel_config",)),
    Name("diffusers.models._modeling_parallel.TensorParallelConfig", LIBRARY, ("tp_degree",)),
    *(
        Name(f"{MODEL}.{name}", REFUSALS)
        for name in (
            "save_pretrained", "load_lora_adapter", "enable_group_offload", "enable_parallelism",
            "set_attn_processor", "is_cache_enabled", "disable_cache", "unfuse_qkv_projections",
        )
    ),
    *(Name(f"{MODEL}.{name}", LIBRARY) for name in ("add_adapter", "push_to_hub", "_load_ip_adapter_weights")),
    Name("diffusers.FluxPipeline.load_lora_weights", REFUSALS),
    Name("diffusers.FluxPipeline.load_ip_adapter", REFUSALS),
    Name("diffusers.DiffusionPipeline.from_pretrained", PIPELINE),
    Name("diffusers.DiffusionPipeline.register_to_config", PIPELINE),
    Name(f"{MODEL}.register_to_config", "loader/layers/attention.py"),
    Name("diffusers.models.normalization.RMSNorm", NORMS, ("dim", "eps")),
    Name("diffusers.models.normalization.LpNorm", NORMS, ("p", "dim", "eps")),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_each_name_stands(name: Name) -> None:
    """The name is there, takes what we pass, and is used where the table says."""
    name.check()


@pytest.mark.parametrize("name", ["_keep_in_fp32_modules", "_keys_to_ignore_on_load_unexpected", "_parallel_config"])
def test_diffusers_itself_goes_by_the_attribute(name: str) -> None:
    """An attribute that nobody read would still stand on the class: what loads or refuses in diffusers asks it."""
    asked = f".{name}" in inspect.getsource(modeling_utils)
    assert asked, f"diffusers does not read {name} any more, we do ({LIBRARY}, {REFUSALS})"


@pytest.mark.parametrize("name", [name for name in sorted(ENTRIES) if not ENTRIES[name].plan])
def test_classes_without_a_plan_of_ours_have_their_own(name: str) -> None:
    """The catalogue leaves the plan to the class where the class has one, in words that we read."""
    raw = getattr(found(f"diffusers.{name}", "shardconv/plans/catalogue"), "_tp_plan", None)
    if diffusers.__version__ in ENTRIES[name].checked:
        assert raw, f"{name}._tp_plan is gone; shardconv/plans/catalogue counts on it"
        assert plan.parse_plan(raw, f"{name}._tp_plan")
    else:  # an older version had none yet: then the class is refused, not cut by a guess
        assert has_plan("diffusers", name) is bool(raw), f"{name}._tp_plan"


@pytest.mark.parametrize(
    ("name", "layer", "attribute"),
    [
        ("Flux2Transformer2DModel", "single_transformer_blocks.0.attn.to_qkv_mlp_proj", "_tp_packed_col_blocks"),
        ("Flux2Transformer2DModel", "single_transformer_blocks.0.attn.to_out", "_tp_packed_row_blocks"),
        ("FluxTransformer2DModel", "single_transformer_blocks.0.proj_out", "_tp_packed_row_blocks"),
    ],
)
def test_packed_layers_carry_their_blocks(name: str, layer: str, attribute: str) -> None:
    """Widths of the parts of a fused layer, whose sum is the layer's (shardconv/plans/match.py)."""
    linear = skeleton(getattr(diffusers, name), cases.CASES[name].config).get_submodule(layer)
    assert hasattr(linear, attribute), f"{name}: {layer}.{attribute} is gone; shardconv/plans/match.py reads it"
    widths = (linear.out_features, linear.in_features)
    assert sum(getattr(linear, attribute)) == widths[attribute.endswith("row_blocks")], f"{attribute} of {layer}"


def test_hooks_are_told_by_name() -> None:
    """A hooked module has a `_diffusers_hook` with its hooks' names in `hooks` (loader/layers/refusals.py)."""
    layer = nn.Linear(1, 1)
    HookRegistry.check_if_exists_or_initialize(layer).register_hook(ModelHook(), "mine")
    held = getattr(getattr(layer, "_diffusers_hook", None), "hooks", ())
    assert list(held) == ["mine"], f"module._diffusers_hook.hooks is gone; {REFUSALS} asks it"
    for known in ("group_offloading", "layerwise_casting"):
        names = vars(found(f"diffusers.hooks.{known}", REFUSALS)).values()
        assert known in names, f"diffusers.hooks.{known}: no hook is called {known!r} any more; {REFUSALS} looks for it"


@pytest.mark.parametrize(("name", "where"), [("hf_quantizer", modeling_utils), ("is_quantized", quantizers_base)])
def test_a_quantized_model_tells_itself(name: str, where: ModuleType) -> None:
    """diffusers marks a quantized model by these attributes (loader/layers/refusals.py)."""
    assert f"model.{name} = " in inspect.getsource(where), f"model.{name} is not set any more; {REFUSALS} asks it"


@pytest.mark.parametrize("name", ["RMSNorm", "LpNorm"])
def test_norms_hold_what_ours_use(name: str) -> None:
    """Ours take the place of a norm by `__class__` and use its own attributes (loader/layers/norms.py)."""
    norm: Any = found(f"diffusers.models.normalization.{name}", NORMS)
    made = norm(4, eps=1e-6) if name == "RMSNorm" else norm(p=2, dim=-1)
    for attribute in ("eps", "weight", "bias") if name == "RMSNorm" else ("eps", "p"):
        assert hasattr(made, attribute), f"{name}.{attribute} is gone; {NORMS} uses it"
    assert made(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize("name", sorted(_ACTIVATIONS))
def test_activations_hold_their_projection(name: str) -> None:
    """The input layer of a feed-forward is the activation's `proj` (shardconv/plans/catalogue/entry.py)."""
    cls = getattr(activations, name, None)
    assert cls is not None, f"diffusers.models.activations.{name} is gone; shardconv/plans/catalogue/entry.py names it"
    made = cls(4, 8)
    assert isinstance(getattr(made, "proj", None), nn.Linear), f"{name}.proj is gone"
    assert made.proj.out_features == 8 * _ACTIVATIONS[name], f"{name} gives another number of parts"


def test_attention_stores_the_head_counts_that_the_catalogue_names() -> None:
    """Class by class: an attention that the catalogue names is there, and has each attribute that is made local."""
    for name in sorted(ENTRIES.keys() & set(dir(diffusers))):
        model = skeleton(getattr(diffusers, name), cases.CASES[name].config)
        kinds = {type(module).__name__: module for module in model.modules()}
        for kind, attributes in ENTRIES[name].heads.items():
            for attribute in attributes if kind in kinds else ():
                counted = type(vars(kinds[kind]).get(attribute)) is int
                assert counted, f"{name}: {kind}.{attribute} is gone; shardconv/plans/catalogue makes it local"
        named = not ENTRIES[name].heads or kinds.keys() & ENTRIES[name].heads.keys()
        assert named, f"{name}: none of {', '.join(ENTRIES[name].heads)} is in it; shardconv/plans/catalogue names them"
        for key in ENTRIES[name].config:
            assert type(model.config.get(key)) is int, f"{name}: config.{key} is gone; pipelines size caches by it"
