"""What the ranks of the catalogue's tests run. Importing this imports every class once, for all forked ranks."""

from __future__ import annotations

import contextlib
import json
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import small_sets
import torch
import torch.distributed as dist

import loader
from loader import parallel
from loader.layers import attention as fixups
from loader.layers import linear, norms
from shardconv.errors import LoadError, ShardconvWarning
from shardconv.format.plan import Plan, PlanChoice, Style
from shardconv.plans.catalogue import ENTRIES, cases, small_models
from shardconv.trial import check_ranks

for _name in cases.CASES.keys() & set(dir(diffusers)):
    getattr(diffusers, _name)


def compare_each(given: Sequence[tuple[str, Path, list[torch.Tensor]]]) -> dict[str, dict[str, float | str]]:
    """Of every class (name, converted folder, unsharded outputs): the worst rank's difference for each way to shard the
    small model, of the largest output; or the traceback of a rank where one failed.

    `set`: loaded from the folder; on two ranks also `lean` and `auto-rows`: sharded in memory.
    """
    found = {}
    for name, out, expected in given:
        found[name] = {way: _worst(make, expected, split=way != "set") for way, make in _ways(name, out).items()}
    return found


def _ways(name: str, out: Path) -> dict[str, Callable[[], Any]]:
    ways: dict[str, Callable[[], Any]] = {
        "set": lambda: loader.load_model(out, device="cpu"),
        "lean": lambda: loader.parallelize(cases.build(name), lean=True),
        "auto-rows": lambda: loader.parallelize(cases.build(name), plan="auto-rows"),
    }
    unasked = {"lean", "auto-rows"} if dist.get_world_size() > 2 else set() if ENTRIES[name].lean else {"lean"}
    return {way: make for way, make in ways.items() if way not in unasked}


def _worst(make: Callable[[], Any], expected: list[torch.Tensor], split: bool) -> float | str:
    """Of the ranks' differences; how a rank failed counts as worse than any."""
    try:
        model = make()
        assert split == any(isinstance(module, linear.RowwiseSplitInputLinear) for module in model.modules())
        mine: float | str = small_sets.difference(_agreed(cases.outputs(model, cases.inputs(model))), expected)
    except Exception:
        mine = traceback.format_exc()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return max(told, key=lambda each: (isinstance(each, str), each))


def _agreed(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, which every rank must have to the bit: experts chosen from others would go apart."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, [each.numpy().tobytes() for each in outputs])
    assert all(each == told[0] for each in told)
    return outputs


def load_and_compare(out: Path, expected: list[torch.Tensor]) -> float:
    """The difference of the loaded model alone."""
    model = loader.load_model(out, device="cpu")
    return small_sets.difference(_agreed(cases.outputs(model, cases.inputs(model))), expected)


def warnings_of_loading(out: Path) -> list[str]:
    """What loading `out` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader.load_model(out, device="cpu")
    return [str(each.message) for each in caught if issubclass(each.category, ShardconvWarning)]


def compare(name: str, config: Mapping[str, Any], plan: Plan | None = None, dtype: torch.dtype | None = None) -> float:
    """Likewise for a model sharded in memory under `plan`, all of it in `dtype`."""
    whole = cases.build(name, config).to(dtype)
    expected = cases.outputs(whole, _cast(cases.inputs(whole), dtype))
    model = loader.parallelize(cases.build(name, config).to(dtype), plan=plan)
    return small_sets.difference(cases.outputs(model, _cast(cases.inputs(model), dtype)), expected)


def compile_block(name: str) -> tuple[int, float]:
    """Number of graphs when a whole block is compiled, and the largest difference from what it gives eagerly."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = loader.parallelize(cases.build(name))
    eager = cases.outputs(model, cases.inputs(model))
    counter = CompileCounterWithBackend("aot_eager")
    block = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))[-1]
    block.forward = torch.compile(block.forward, fullgraph=True, backend=counter)
    compiled = cases.outputs(model, cases.inputs(model))
    return counter.frame_count, small_sets.difference(compiled, eager)


def refine_with_a_sink(model: Any) -> list[torch.Tensor]:
    """The refiner's second mode: keys of a first block, before rotation, come back in front of the next block."""
    from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

    def ropes(*frames: int) -> Any:
        return model.build_rotary_emb_for_absolute_positions(
            batch_size=2, frame_positions=list(frames), height=4, width=4, device="cpu", fps=24.0
        )

    given = cases.inputs(model)
    first = given | {"hidden_states": given["hidden_states"][:, :16], "timestep": given["timestep"][:, :16]}
    cache = SanaWMRefinerKVCache(len(model.transformer_blocks))
    cases.outputs(model, first | {"video_rotary_emb": ropes(0), "kv_cache": cache, "kv_cache_mode": "capture_pre_rope"})
    for layer in cache.layer_caches:
        layer.store_sink(*layer.get_captured_pre_rope())
    cache.sink_pe = ropes(0)
    return cases.outputs(model, given | {"video_rotary_emb": ropes(1, 2), "kv_cache": cache, "kv_cache_mode": "inject"})


def animate_from_a_reference(model: Any) -> list[torch.Tensor]:
    """WanAnimate2's second mode: the generation pass sees keys and values of the reference pass."""
    given, c, draw = cases.inputs(model), model.config, cases.Draw(9)
    cases.outputs(model, given)  # fills the cache
    del given["offset_grid_sizes"]
    return cases.outputs(
        model,
        given
        | {
            "hidden_states": [draw.normal(c.out_dim, 3, 4, 4)],
            "condition_latents": [draw.normal(c.in_dim - c.out_dim, 3, 4, 4)],
            "kv_cache_mode": "cached",
            "seq_len": 12,
            "reference_grid_sizes": torch.tensor([[2, 2, 2]]),
            "origin_len": 5,
            "origin_area": [32, 32],
        },
    )


CACHED = {
    "SanaWMLTX2RefinerTransformer3DModel": refine_with_a_sink,
    "WanAnimate2Transformer3DModel": animate_from_a_reference,
}


def compare_cached(name: str) -> float:
    """The difference in a mode that carries a cache from one call to the next."""
    expected = CACHED[name](cases.build(name))
    return small_sets.difference(CACHED[name](loader.parallelize(cases.build(name))), expected)


class ConvFeedForward(torch.nn.Module):
    """Sana's feed-forward with a bias of 100 in each convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Conv2d(6, 16, 1)
        self.depth = torch.nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.down = torch.nn.Conv2d(8, 6, 1)
        small_models.randomize(self, 0)
        for layer in (self.up, self.depth, self.down):
            torch.nn.init.constant_(layer.bias, 100.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.depth(self.up(x)).chunk(2, dim=1)
        return self.down(value * torch.tanh(gate / 100))


def compare_convolutions() -> float:
    """The difference of a sharded convolutional feed-forward from the whole one."""
    packed = {"style": "packed_colwise", "blocks": [1, 1]}
    x = cases.Draw(3).normal(2, 6, 5, 5)
    with torch.inference_mode():
        expected = ConvFeedForward()(x)
        sharded = loader.parallelize(ConvFeedForward(), plan={"up": packed, "depth": packed, "down": "rowwise"})
        return small_sets.difference([sharded(x)], [expected])


def check(name: str, tp: int, plan: Mapping[str, Any] | None, fault: str = "none") -> dict[str, Any]:
    """The report of `shardconv check`, with a fault put in."""
    with tempfile.TemporaryDirectory() as folder, FAULTS[fault]():
        job = {"model_class": name, "config": None, "tp": tp, "choice": PlanChoice.of(plan).to_json()}
        Path(folder, "job.json").write_text(json.dumps(job))
        check_ranks.main(folder)
        return dict(json.loads(Path(folder, "report.json").read_text()))


def _cast(given: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(given, torch.Tensor) and dtype is not None and given.dtype == torch.float32:
        return given.to(dtype)
    if isinstance(given, dict):
        return {key: _cast(value, dtype) for key, value in given.items()}
    return type(given)(_cast(item, dtype) for item in given) if isinstance(given, (list, tuple)) else given


def compare_without(name: str, fault: str, config: Mapping[str, Any] | None = None) -> float | str:
    """The difference when one fix-up is left out, or the error that it ends with."""
    with FAULTS[fault]():
        try:
            return compare(name, cases.CASES[name].config | (config or {}))
        except (RuntimeError, LoadError) as error:
            return type(error).__name__


def _nothing(name: str) -> Any:
    return lambda: mock.patch.object(parallel, name)


def _local_statistics() -> Any:
    """Norms take the mean over the features of their own rank."""

    def keep(norm: Any, planned: Any, group: Any) -> None:
        norm.normalized_shape = (sum(planned.cut.block_sizes) // group.size,)

    kinds = dict.fromkeys(norms.KINDS, keep)
    return mock.patch.object(norms, "MAKERS", {Style.NORM_ACROSS_HEADS: kinds})


def _first_table() -> Any:
    """Every rank takes the first part of a rope table."""

    class First(fixups._RopeSlicer):
        def __init__(self, arguments: Any, ranks: Any) -> None:
            super().__init__(arguments, ranks)
            self._rank = 0

    return mock.patch.object(fixups, "_RopeSlicer", First)


def _local_convolution() -> Any:
    return mock.patch.object(linear.RowwiseConv2d, "forward", torch.nn.Conv2d.forward)


FAULTS = {
    "none": contextlib.nullcontext,
    "heads left whole": _nothing("make_counts_local"),
    "norm left local": _local_statistics,
    "rope left whole": _nothing("slice_ropes"),
    "rope of rank 0": _first_table,
    "experts not summed": _nothing("sum_outputs"),
    "convolution not summed": _local_convolution,
}
