"""Orders of sharding and of what else is done to a model: those that work are right, others are refused."""

from __future__ import annotations

import functools
from typing import Any

import accelerate
import diffusers
import pytest
import ranks
import small_sets
import torch
from diffusers.hooks import HookRegistry
from torch import nn

import loader
import shardconv
from shardconv.plans.catalogue import cases

FLUX = "FluxTransformer2DModel"
TOLERANCE = 1e-5  # of the largest output
CPU = torch.device("cpu")


def pipeline_of(model: Any) -> Any:
    """A pipeline with nothing but a denoiser."""
    absent = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return diffusers.FluxPipeline(diffusers.FlowMatchEulerDiscreteScheduler(), transformer=model, **absent)


# --- what is refused, and by which name


def offloaded_in_groups(model: Any) -> None:
    model.enable_group_offload(CPU, offload_type="leaf_level")


def offloaded_by_layers(model: Any) -> None:
    accelerate.cpu_offload(model, execution_device=CPU)


def cached(model: Any) -> None:
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))


def cast_by_layers(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


def with_another_forward(model: Any) -> None:
    layer = model.transformer_blocks[0].attn.to_q
    layer.forward = functools.partial(nn.functional.linear, weight=layer.weight, bias=layer.bias)


def test_a_replaced_forward_is_named() -> None:
    """A planned layer whose `forward` somebody replaced would run that, and not the sum over the ranks."""
    model = cases.build(FLUX)
    with_another_forward(model)
    with pytest.raises(shardconv.PlanError, match=r"transformer_blocks.0.attn.to_q: its forward was replaced by anoth"):
        loader.parallelize(model)


def test_all_that_stands_in_a_model_is_named_at_once() -> None:
    """Two reasons are two issues of one error."""
    model = cases.build(FLUX)
    cached(model)
    cast_by_layers(model)
    with pytest.raises(shardconv.PlanError, match="2 problems:") as caught:
        loader.parallelize(model)
    assert [issue.split(": ")[0] for issue in caught.value.issues] == [FLUX, FLUX]


def fused_classes() -> list[str]:
    """One class of each way in which diffusers fuses."""
    return [FLUX, "WanTransformer3DModel", "PixArtTransformer2DModel", "CogVideoXTransformer3DModel"]


@pytest.mark.parametrize("name", fused_classes())
def test_fused_projections_are_refused_until_they_are_apart_again(name: str) -> None:
    """`parallelize` names fused projections; after `unfuse_qkv_projections` it takes the model, whatever is left of
    them."""
    model = cases.build(name)
    model.fuse_qkv_projections()
    with pytest.raises(shardconv.PlanError, match=rf"^{name}: \S+ has its projections fused; unfuse_qkv_projections"):
        loader.parallelize(model)
    model.unfuse_qkv_projections()
    loader.parallelize(model)


# --- orders that work


def hooks_taken_off(model: Any) -> Any:
    """As `remove_all_hooks` of a pipeline does: every module keeps a bound `forward` of its class."""
    offloaded_by_layers(model)
    pipeline_of(model).remove_all_hooks()
    return loader.parallelize(model)


def groups_taken_off(model: Any) -> Any:
    offloaded_in_groups(model)
    for module in model.modules():
        for name in list(module._diffusers_hook.hooks) if hasattr(module, "_diffusers_hook") else ():
            module._diffusers_hook.remove_hook(name, recurse=False)
    assert any("forward" in module.__dict__ for module in model.modules() if type(module) is nn.Linear)
    return loader.parallelize(model)


def run_in_a_pipeline(model: Any) -> Any:
    """A pipeline enters a cache context at each step, which leaves an empty registry of hooks behind."""
    with model.cache_context("cond"):
        cases.outputs(model, cases.inputs(model))
    assert not HookRegistry.check_if_exists_or_initialize(model).hooks
    return loader.parallelize(model)


def cache_before_and_after(model: Any) -> Any:
    cached(model)
    model.disable_cache()
    loader.parallelize(model)
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.0))
    return model


ORDERS = [hooks_taken_off, groups_taken_off, run_in_a_pipeline, cache_before_and_after]


def differences_of(orders: list[Any]) -> dict[str, float]:
    whole = cases.build(FLUX)
    expected = cases.outputs(whole, cases.inputs(whole))
    return {order.__name__: small_sets.difference(_outputs(order(cases.build(FLUX))), expected) for order in orders}


def _outputs(model: Any) -> list[torch.Tensor]:
    with model.cache_context("cond"):
        return cases.outputs(model, cases.inputs(model))


@pytest.mark.slow
def test_the_order_that_works_gives_the_unsharded_output() -> None:
    """Hooks taken off, a cache off before and on after, a run in a pipeline before: each is
    sharded and equal to the unsharded model. A bound `forward` left by a hook must not hide the collective."""
    for found in ranks.values(differences_of, ORDERS):
        assert set(found) == {order.__name__ for order in ORDERS}
        assert max(found.values()) <= TOLERANCE, found


def fuse_where_rows_are_cut() -> None:
    model = loader.parallelize(cases.build(FLUX), plan="auto-rows")
    model.fuse_qkv_projections()
    cases.outputs(model, cases.inputs(model))


@pytest.mark.slow
def test_projections_cut_by_their_inputs_are_not_fused() -> None:
    """Under auto-rows a fused projection would take its whole input as a slice: an error, on every rank."""
    for outcome in ranks.run(fuse_where_rows_are_cut):
        assert outcome.error == "RuntimeError"
        assert "shapes cannot be multiplied" in outcome.text
