"""Ways to a quietly wrong number that are refused: ranks that disagree, gradients, a config that was edited."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import ranks
import small_sets
import torch
import torch.distributed as dist
from small_minimax import MINIMAX_PLAN

import loader
import shardconv
from shardconv.libraries.skeleton import skeleton

NAME = "qwenimage"


def load_in_other_dtypes(path: Path) -> None:
    loader.load_model(path, device="cpu", dtype=[torch.bfloat16, torch.float16][dist.get_rank()])


@pytest.mark.slow
def test_ranks_that_ask_for_other_dtypes_are_refused() -> None:
    """bf16 on one rank and fp16 on another would be added up as if they were one."""
    outcome = ranks.same(ranks.run(load_in_other_dtypes, small_sets.converted(NAME, 2)))
    assert outcome.error == "LoadError"
    assert "the ranks load different things" in outcome.text
    assert "as torch.bfloat16" in outcome.text
    assert "as torch.float16" in outcome.text


def parallelize_by_other_plans() -> None:
    block = dist.get_rank()
    names = {"img_mlp.net.0.proj": "colwise", "img_mlp.net.2": "rowwise"}
    plan = {f"transformer_blocks.{block}.{name}": style for name, style in names.items()}
    loader.parallelize(small_sets.build(NAME), plan=plan)


def parallelize_other_configs() -> None:
    model = small_sets.build(NAME)
    model.register_to_config(axes_dims_rope=(6, 4, 6) if dist.get_rank() else (4, 6, 6))
    loader.parallelize(model)


def parallelize_other_buffers() -> None:
    model = small_sets.build(NAME)
    model.register_buffer("table", torch.full([4], 1.0 + dist.get_rank()))
    loader.parallelize(model)


@pytest.mark.slow
@pytest.mark.parametrize("function", [parallelize_by_other_plans, parallelize_other_configs, parallelize_other_buffers])
def test_ranks_that_hold_other_things_are_refused(function: Any) -> None:
    """Plans, configs and buffers that differ between ranks are found before anything is cut."""
    outcome = ranks.same(ranks.run(function))
    assert outcome.error == "LoadError"
    assert "the ranks hold different weights, configs or plans" in outcome.text


def backward(path: Path) -> None:
    model = loader.load_model(path, device="cpu")
    inputs = small_sets.inputs(NAME)
    inputs["hidden_states"].requires_grad_()
    model(**inputs, return_dict=False)


@pytest.mark.slow
def test_gradients_are_refused() -> None:
    """An input that wants a gradient gets an error, not each rank's own wrong one."""
    for outcome in ranks.run(backward, small_sets.converted(NAME, 2)):
        assert outcome.error == "RuntimeError"
        assert "a sharded model has no gradients" in outcome.text


@pytest.mark.parametrize("change", [{"axes_dims_rope": [6, 4, 6]}, {"zero_cond_t": True}])
def test_an_edited_config_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """A key that changes the computation and no shape: the set knows the config that it was made for."""
    out = small_sets.copied(small_sets.converted(NAME, 1), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    loader.load_model(out, device="cpu")
    (out / "config.json").write_text(json.dumps(config | {"_name_or_path": "elsewhere", "_diffusers_version": "9"}))
    loader.load_model(out, device="cpu")
    (out / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(shardconv.SetError, match=r"config\.json: not the config that was converted"):
        loader.load_model(out, device="cpu")


def local_into_split_input(plan: dict[str, Any]) -> None:
    from small_minimax import build_minimax

    model = loader.parallelize(build_minimax(), plan=plan)
    layer = model.transformer_blocks[0].adaln_proj.linear
    layer(torch.zeros(1, layer.in_features))


@pytest.mark.slow
def test_a_local_input_where_a_whole_one_belongs_fails_on_every_rank() -> None:
    """rowwise_split_input slices for itself; given a slice, all ranks raise and none waits for the others."""
    for outcome in ranks.run(local_into_split_input, MINIMAX_PLAN, timeout=30):
        assert outcome.error == "RuntimeError"
        assert "expected a whole input of" in outcome.text


@pytest.mark.parametrize("style", ["colwise"])
def test_c2_a_fused_layer_in_a_plan_file_is_warned_about(tmp_path: Path, style: str) -> None:
    """A gated feed-forward cut as one block gives the next layer twice what it takes: one warning says so, another one
    that the catalogue packs it."""
    from small_minimax import build_minimax

    build_minimax().save_pretrained(tmp_path / "in")
    wrong = MINIMAX_PLAN | {"transformer_blocks.*.ff.net.0.proj": style}
    fused, doubled = r"a fused layer cut as colwise", r"looks like 2 fused layers; packed_colwise"
    with (
        pytest.warns(shardconv.ShardconvWarning, match=fused),
        pytest.warns(shardconv.ShardconvWarning, match=doubled),
    ):
        shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2, plan=wrong)


def test_building_in_threads_leaves_torch_as_it_was() -> None:
    """Skeletons built side by side restore torch's own methods and default dtype, and do not touch each other."""
    model = small_sets.build(NAME)
    register, dtype = torch.nn.Module.register_parameter, torch.get_default_dtype()
    real: list[bool] = []

    def build() -> None:
        for _ in range(4):
            skeleton(type(model), dict(model.config), torch.bfloat16)
            real.append(torch.nn.Linear(2, 2).weight.is_meta)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.nn.Module.register_parameter is register
    assert torch.get_default_dtype() == dtype
    assert real == [False] * 16


def called_with_noise(path: Path, seeds: list[int]) -> str:
    model = loader.load_model(path, device="cpu")
    loader.check_inputs(model)
    inputs = small_sets.inputs(NAME)
    noise = torch.Generator().manual_seed(seeds[dist.get_rank()])
    inputs["hidden_states"] = torch.randn(inputs["hidden_states"].shape, generator=noise)
    with torch.no_grad():
        model(**inputs, return_dict=False)
        inputs["hidden_states"] += dist.get_rank()  # looked at once only
        model(**inputs, return_dict=False)
    return "done"


@pytest.mark.slow
def test_different_noise_is_found_when_asked_for() -> None:
    """`check_inputs` raises on every rank, names the input, and costs later calls nothing."""
    assert ranks.values(called_with_noise, small_sets.converted(NAME, 2), [1, 1]) == ["done", "done"]
    outcome = ranks.same(ranks.run(called_with_noise, small_sets.converted(NAME, 2), [1, 2]))
    assert outcome.error == "LoadError"
    assert "the ranks were called with different hidden_states; give every rank the same" in outcome.text
