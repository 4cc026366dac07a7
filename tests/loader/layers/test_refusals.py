"""What is refused before a model is sharded and after it, with the reason that is there and the order that works."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import ranks
import small_pipelines
import small_sets
import torch
from diffusers.hooks import HookRegistry
from diffusers.models.attention_processor import (
    FluxIPAdapterJointAttnProcessor2_0,
    SD3IPAdapterJointAttnProcessor2_0,
)
from torch import nn

import loader
import shardconv
from loader.layers.refusals import check_model, check_plain, holds_parameters
from shardconv import PlanError, ShardconvWarning, UsageError
from shardconv.plans.catalogue import ENTRIES, cases

SD3 = "SD3Transformer2DModel"
FLUX = "FluxTransformer2DModel"


def sd3_adapter() -> nn.Module:
    return SD3IPAdapterJointAttnProcessor2_0(hidden_size=8, ip_hidden_states_dim=8, head_dim=4)


def flux_adapter() -> nn.Module:
    return FluxIPAdapterJointAttnProcessor2_0(hidden_size=8, cross_attention_dim=8)


class Plain:
    """A processor without tensors."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class Holding(Plain):
    """One that is no module and holds a layer all the same."""

    def __init__(self) -> None:
        self.layers = [nn.Linear(2, 2)]


# Before


def fuse(model: Any) -> None:
    model.fuse_qkv_projections()


def give_adapter(model: Any) -> None:
    model.set_attn_processor(sd3_adapter())


def give_holding(model: Any) -> None:
    model.set_attn_processor(Holding())


def cache(model: Any) -> None:
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))


def cast_layers(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)


def offload_groups(model: Any) -> None:
    model.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level")


def offload(model: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(model.proj_out, AlignDevicesHook("cpu"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (fuse, r"has its projections fused; unfuse_qkv_projections\(\) first, shard it, then fuse_qkv_projections"),
        (give_adapter, r"a processor with parameters of its own \(SD3IPAdapter.*unload_ip_adapter\(\) first"),
        (give_holding, r"a processor with parameters of its own \(Holding\)"),
        (cache, r"has a cache enabled; disable_cache\(\) first, shard it, then enable_cache"),
        (cast_layers, r"is cast layer by layer; load it without, shard it, then enable_layerwise_casting"),
        (offload_groups, "carries an offload hook; load it without offloading"),
        (offload, "proj_out carries an offload hook; load it without offloading"),
    ],
)
def test_what_was_done_to_a_model_is_named(change: Callable[[Any], None], said: str) -> None:
    """A model that was changed in a way that sharding would undo or miss is refused by what was done, with the order
    that works; before the change it is taken."""
    model = cases.build(FLUX)
    check_plain(model)
    change(model)
    with pytest.raises(PlanError, match=rf"^{FLUX}: .*{said}"):
        check_plain(model)


def test_a_model_that_ran_in_a_pipeline_is_taken() -> None:
    """Registries that diffusers leaves on a model after a run hold no hook, and are none."""
    model = cases.build(FLUX)
    for module in model.modules():
        HookRegistry.check_if_exists_or_initialize(module)
    check_plain(model)


@pytest.mark.slow
def test_what_is_no_model_is_named() -> None:
    """A pipeline, a compiled model, and anything else: what to give instead."""
    pipeline = small_pipelines.build_flux_pipeline()
    for take in (loader.parallelize, loader.check_inputs):
        with pytest.raises(UsageError, match="found a pipeline, FluxPipeline; give its transformer"):
            take(pipeline)
        with pytest.raises(UsageError, match=r"torch.compile wrapped .*shard it first, then compile"):
            take(torch.compile(pipeline.transformer))
        with pytest.raises(UsageError, match="found str; load one"):
            take("out/transformer")
    check_model(pipeline.transformer)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ENTRIES.keys() & set(dir(diffusers))))
def test_no_class_has_such_processors_by_itself(name: str) -> None:
    """The processors that classes come with hold nothing, so none is refused for them."""
    model = cases.build(name)
    assert not [path for path, module in model.named_modules() if holds_parameters(getattr(module, "processor", None))]


# After


def try_after() -> list[str]:
    """What a sharded model and a pipeline round it say to adapters and processors; others are set."""
    said = []
    model = loader.parallelize(cases.build(SD3))
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=model, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=None, text_encoder=None,
        tokenizer=None, text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None,
    )  # fmt: skip
    for attempt in (
        lambda: model.set_attn_processor(sd3_adapter()),
        lambda: model.set_attn_processor({name: sd3_adapter() for name in model.attn_processors}),
        lambda: model.set_attn_processor(Holding()),
        lambda: model._load_ip_adapter_weights({}),
        lambda: pipeline.transformer._load_ip_adapter_weights({}),
    ):
        try:
            attempt()
        except ValueError as error:
            said.append(str(error))
    plain = Plain()
    model.set_attn_processor(plain)
    assert all(each is plain for each in model.attn_processors.values())
    assert all(each is plain for each in copy.deepcopy(model).attn_processors.values()) is False
    pickle.dumps(model.set_attn_processor)
    return said


@pytest.mark.slow
def test_a_sharded_model_takes_no_adapter() -> None:
    """Processors with parameters are refused on a sharded model, set one for all, one each or by loading; others are
    taken as ever."""
    for said in ranks.values(try_after, n=2):
        assert len(said) == 5
        assert all("is sharded with tensor parallelism, so it cannot" in each for each in said)
        assert all("run that model unsharded" in each for each in said)


def load_adapters(path: Path) -> list[str]:
    pipeline = loader.load_pipeline(path, device="cpu")
    said = []
    for attempt in (pipeline.load_ip_adapter, pipeline.load_lora_weights):
        try:
            attempt("org/adapter", weight_name="adapter.safetensors")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_a_sharded_pipeline_loads_no_adapter(tmp_path: Path) -> None:
    """`load_ip_adapter` and `load_lora_weights` are refused before anything is fetched."""
    small_pipelines.build_flux_pipeline().save_pretrained(tmp_path / "source")
    shardconv.convert(tmp_path / "source", tmp_path / "out", tp=2)
    for said in ranks.values(load_adapters, tmp_path / "out", n=2):
        assert ["an IP-Adapter" in said[0], "LoRA weights" in said[1]] == [True, True]


def fused_after() -> float:
    """Difference of the output when queries, keys and values are fused after sharding."""
    model = cases.build(FLUX)
    expected = cases.outputs(model, cases.inputs(model))
    model = loader.parallelize(model)
    model.fuse_qkv_projections()
    return small_sets.difference(cases.outputs(model, cases.inputs(model)), expected)


@pytest.mark.slow
def test_projections_are_fused_after_sharding() -> None:
    """The order that the refusal names works."""
    assert max(ranks.values(fused_after, n=2)) <= 1e-5


# Launchers


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, {"SLURM_STEP_NUM_TASKS": "4"}, {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_SIZE": "8"}, {"MV2_COMM_WORLD_SIZE": "2"},
    ],
)  # fmt: skip
def test_a_launcher_without_a_group_is_noticed(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes of srun or mpirun that never met load the whole model each: said once a process."""
    from loader.group import ranks as loader_ranks

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    loader_ranks._warn_alone.cache_clear()
    with pytest.warns(ShardconvWarning, match="each of these processes loads the whole model") as caught:
        assert [loader_ranks.ranks_of().size for _ in range(2)] == [1, 1]
    assert len(caught) == 1
    loader_ranks._warn_alone.cache_clear()


@pytest.mark.parametrize(
    "variables",
    [{"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"PMI_SIZE": ""}, {}],
)
def test_one_process_is_no_matter(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one task in a job of several, one process under mpirun, or no launcher: nothing is said."""
    from loader.group import ranks as loader_ranks

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    loader_ranks._warn_alone.cache_clear()
    assert loader_ranks.ranks_of().size == 1
