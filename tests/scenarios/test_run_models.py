"""Sharded models give what the unsharded ones give: every supported class, converted, loaded, run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import ranks
import small_sets
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import loader
from shardconv.plans.catalogue import small_models

FP32_TOLERANCE = 1e-5  # of the largest output; measured: at most 4.7e-07 on 2 and 4 ranks
BF16_TOLERANCE = 0.025  # of the largest output; measured: 0.0103 (flux), at most 0.0077 (others); a bf16 step is 0.004
SMALL = small_models.NAMES
BF16 = torch.bfloat16


def expected_of(name: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What the unsharded model gives, loaded as diffusers loads it."""
    cls = getattr(diffusers, small_models.class_name(name))
    model = cls.from_pretrained(small_sets.source(name), torch_dtype=dtype)
    return small_sets.outputs(model, name, dtype)


def load_and_run(path: Path, name: str, **options: Any) -> list[torch.Tensor]:
    model = loader.load_model(path, device="cpu", **options)
    return small_sets.outputs(model, name, model.dtype)


def load_and_run_cast(path: Path, name: str) -> list[torch.Tensor]:
    return load_and_run(path, name, dtype=BF16)


def load_and_parallelize(path: Path, source: Path, name: str) -> bool:
    """Whether a model sharded in memory gives bit for bit what the loaded one gives."""
    tp = dist.get_world_size()
    whole = getattr(diffusers, small_models.class_name(name)).from_pretrained(source)
    own_plan = dict(type(whole)._tp_plan)
    sharded = loader.parallelize(whole, tp=tp, plan=own_plan, group=dist.group.WORLD)
    assert sharded is whole
    loaded = load_and_run(path, name)
    return all(map(torch.equal, small_sets.outputs(sharded, name), loaded))


def run_in_replicas(path: Path, name: str) -> tuple[int, int, list[torch.Tensor]]:
    """On 4 ranks: two copies of a tp 2 model; global and own rank, and the output."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    outputs = load_and_run(path, name, group=mesh["tp"])
    return dist.get_rank(), mesh["tp"].get_local_rank(), outputs


def run_in_crossed_replicas(path: Path, name: str) -> tuple[float, list[torch.Tensor]]:
    """On 4 ranks: copies on ranks (0, 2) and (1, 3), so that the rank in the group is not the one on the node."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = pairs[dist.get_rank() % 2]
    loaded = loader.load_model(path, device="cpu", group=group)
    sharded = loader.parallelize(small_models.build(name), group=group)
    first = next(key for key, value in loaded.named_parameters() if "attn.to_q.weight" in key)
    gap = float((loaded.get_parameter(first) - sharded.get_parameter(first)).abs().max())
    return gap, small_sets.outputs(loaded, name)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", SMALL)
def test_f12_sharded_output_equals_unsharded_in_fp32(name, tp):
    """A converted model on 2 and 4 ranks gives on every rank what the unsharded model gives, to 1e-5."""
    found = ranks.values(load_and_run, small_sets.converted(name, tp), name, n=tp)
    expected = expected_of(name)
    assert max(small_sets.difference(each, expected) for each in found) <= FP32_TOLERANCE
    assert all(all(map(torch.equal, each, found[0])) for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", SMALL)
def test_f12_sharded_output_equals_unsharded_in_bf16(name, tp):
    """Cast to bf16 by `convert` or by `load_model` (which agree bit for bit), output stays near the unsharded one."""
    expected = expected_of(name, BF16)
    stored = ranks.values(load_and_run, small_sets.converted(name, tp, dtype="bf16"), name, n=tp)
    cast = ranks.values(load_and_run_cast, small_sets.converted(name, tp), name, n=tp)
    assert max(small_sets.difference(each, expected) for each in stored) <= BF16_TOLERANCE
    assert all(each[0].dtype is BF16 for each in stored)
    assert all(all(map(torch.equal, a, b)) for a, b in zip(stored, cast, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "qwenimage21"])
def test_a_self_contained_set_gives_the_same_output(name):
    """Where replicated tensors stand makes no difference to the output, bit for bit."""
    once = ranks.values(load_and_run, small_sets.converted(name, 2), name)
    each_rank = small_sets.converted(name, 2, self_contained=True)
    assert not (each_rank / "tp2" / "replicated.safetensors").exists()
    for a, b in zip(ranks.values(load_and_run, each_rank, name), once, strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_one_rank_needs_no_process_group_and_is_bit_equal(name):
    """A tp 1 set loads without torch.distributed and gives bit for bit what `from_pretrained` gives."""
    assert not dist.is_initialized()
    found = load_and_run(small_sets.converted(name, 1), name)
    assert all(map(torch.equal, found, expected_of(name)))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", SMALL)
def test_parallelize_is_bit_equal_to_load_model(name, tp):
    """`parallelize` of a model in memory, with tp, plan and group given, is the model that `load_model` loads."""
    found = ranks.values(load_and_parallelize, small_sets.converted(name, tp), small_sets.source(name), name, n=tp)
    assert found == [True] * tp


@pytest.mark.slow
def test_f1_the_rank_within_a_mesh_counts():
    """With a one-dim mesh of a 2 x 2 mesh both copies of a tp 2 model are right: the global rank is not used."""
    name = "flux2"
    expected = expected_of(name)
    found = ranks.values(run_in_replicas, small_sets.converted(name, 2), name, n=4)
    assert [(rank, local) for rank, local, _ in found] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert max(small_sets.difference(outputs, expected) for _, _, outputs in found) <= FP32_TOLERANCE


@pytest.mark.slow
def test_f1_the_rank_within_a_process_group_counts():
    """With groups (0, 2) and (1, 3) every rank takes the slice of its place in the group, not of its global rank."""
    name = "qwenimage"
    expected = expected_of(name)
    found = ranks.values(run_in_crossed_replicas, small_sets.converted(name, 2), name, n=4)
    assert [gap for gap, _ in found] == [0.0] * 4
    assert max(small_sets.difference(outputs, expected) for _, outputs in found) <= FP32_TOLERANCE
