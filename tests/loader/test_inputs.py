"""What ranks compare of their inputs: values wherever they are, devices and addresses never."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import small_pipelines
import small_sets
import torch
import torch.distributed as dist

import loader
import shardconv
from loader.inputs import _Walk

NAME = "flux"


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Held:
    tensor: torch.Tensor
    words: list[str]


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class KVCache:
    """As FLUX.2 klein's and Wan-Animate 2's: empty at first, then with the heads of one rank."""

    def __init__(self, *keys: torch.Tensor) -> None:
        self.layers = list(keys)


def digests(**inputs: Any) -> dict[str, str]:
    walk = _Walk()
    for name, value in inputs.items():
        walk.look(name, value)
    return walk.digests


def long(last: float) -> torch.Tensor:
    """Longer than what torch prints whole, and different in its middle only."""
    tensor = torch.zeros(5000)
    tensor[2500] = last
    return tensor


SAME: list[Any] = [
    None, True, 3, 2.5, 1j, "word", b"bytes", Colour.RED, torch.bfloat16, slice(1, 2), np.float32(1), torch.Size([1]),
    [1, [2, (3,)]], {"a": {"b": [1]}}, OrderedDict(a=1), deque([1, 2]), {1, 2}, np.arange(3), KVCache(), Held,
]  # fmt: skip


@pytest.mark.parametrize("value", SAME, ids=repr)
def test_equal_values_are_equal(value: Any) -> None:
    """Two copies of one value have the same digests, whatever their addresses are."""
    import copy

    assert digests(x=value) == digests(x=copy.deepcopy(value))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensor: tensor, lambda tensor: [tensor], lambda tensor: (1, tensor), lambda tensor: {"a": {"b": tensor}},
        lambda tensor: Held(tensor, []), lambda tensor: Slotted(tensor), lambda tensor: [Held([tensor], [])],
        lambda tensor: deque([tensor]), lambda tensor: tensor.numpy(), lambda tensor: tensor.to(torch.bfloat16),
        lambda tensor: tensor.to(torch.complex64), lambda tensor: torch.view_as_complex(tensor.reshape(-1, 2)).conj(),
    ],
)  # fmt: skip
def test_long_tensors_are_compared_wherever_they_are(wrap: Any) -> None:
    """A single value in the middle of a long tensor tells, in whatever holds it; equal ones are equal."""
    assert digests(x=wrap(long(1))) == digests(x=wrap(long(1)))
    assert digests(x=wrap(long(1))) != digests(x=wrap(long(2)))


def test_shapes_dtypes_and_kinds_tell() -> None:
    """The same bytes as another shape or dtype, and the same values in another kind of object, are different."""
    tensor = torch.arange(8, dtype=torch.int32)
    others = [tensor.reshape(2, 4), tensor.view(torch.float32), [tensor], {"a": tensor}, Held(tensor, []), tensor[:7]]
    assert len({str(digests(x=each)) for each in [tensor, *others]}) == 7


def test_devices_do_not_tell() -> None:
    """Each rank has its own device, by itself or as a tensor's."""
    assert digests(x=torch.device("cuda:0")) == digests(x=torch.device("cuda:1"))
    assert digests(x={"a": torch.zeros(3, device="meta")}) == digests(x={"a": torch.zeros(3, device="meta")})


def test_generators_tell_by_their_state() -> None:
    """Two generators with one seed are equal, with two seeds they are not."""
    one, same, other = (torch.Generator().manual_seed(seed) for seed in (1, 1, 2))
    assert digests(x=one) == digests(x=same) != digests(x=other)


def test_a_cache_is_compared_by_its_shapes() -> None:
    """A cache holds what each rank computed for its own heads: other values are right, other shapes are not."""
    assert digests(kv=KVCache(torch.zeros(3))) == digests(kv=KVCache(torch.ones(3)))
    assert digests(kv=KVCache(torch.zeros(3))) != digests(kv=KVCache(torch.zeros(4)))
    assert digests(x={"kv_cache": Held(torch.zeros(3), [])}) is not None


def test_what_cannot_be_compared_is_named() -> None:
    """Functions, modules and bare objects are left out by name; circles end."""
    walk = _Walk()
    circle: list[Any] = [1]
    circle.append(circle)
    given = {"circle": circle, "lock": threading.Lock(), "call": print, "net": torch.nn.Linear(1, 1), "bare": object()}
    for name, value in given.items():
        walk.look(name, value)
    assert walk.left_out == {"lock", "call", "net", "bare"}


def test_what_holds_everything_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that leads to very many others is left out after a while."""
    monkeypatch.setattr("loader.inputs.MAX_VALUES", 50)
    walk = _Walk()
    walk.look("x", [[each] for each in range(1000)])
    assert walk.left_out


def call(path: Path, seeds: list[int], options: dict[str, Any], compiled: str = "") -> str:
    """Two calls, the first with noise of this rank's seed."""
    model: Any = loader.load_model(path, device="cpu", **options)
    inputs = small_sets.inputs(NAME)
    noise = torch.Generator().manual_seed(seeds[dist.get_rank()])
    inputs["hidden_states"] = torch.randn(inputs["hidden_states"].shape, generator=noise)
    if compiled == "blocks":
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
    run = torch.compile(model, fullgraph=True, backend="eager") if compiled == "whole" else model
    with torch.no_grad():
        run(**inputs, return_dict=False)
        if "blocks" not in compiled:
            inputs["hidden_states"] += dist.get_rank()  # looked at once only
        run(**inputs, return_dict=False)
    return f"{len(model._forward_pre_hooks)} hooks left"


@pytest.mark.slow
def test_different_noise_is_found_unasked() -> None:
    """The first call of a loaded model raises on every rank where the noise differs and names generator and seed; where
    it does not the check takes itself away; `check_inputs=False` leaves it out."""
    path = small_sets.converted(NAME, 2)
    assert ranks.values(call, path, [1, 1], {}) == ["0 hooks left"] * 2
    assert ranks.values(call, path, [1, 2], {"check_inputs": False}) == ["0 hooks left"] * 2
    outcome = ranks.same(ranks.run(call, path, [1, 2], {}))
    assert outcome.error == "LoadError"
    assert "the ranks were called with different hidden_states; give every rank the same inputs" in outcome.text
    assert "generator" in outcome.text
    assert "seed" in outcome.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_check_stays_out_of_compiled_code() -> None:
    """A whole model, or its blocks, compile in one graph with the check waiting; with blocks compiled it still finds
    different noise."""
    path = small_sets.converted(NAME, 2)
    ranks.values(call, path, [1, 1], {}, "whole")
    assert ranks.values(call, path, [1, 1], {}, "blocks") == ["0 hooks left"] * 2
    assert ranks.same(ranks.run(call, path, [1, 2], {}, "blocks")).error == "LoadError"


def call_pipeline(path: Path, how: str, seeds: list[int]) -> None:
    import diffusers

    pipeline = loader.load_pipeline(path, device="cpu")
    if how == "model in a pipeline":
        model = loader.load_model(path, subfolder="transformer", device="cpu")
        pipeline = diffusers.FluxPipeline(**{**pipeline.components, "transformer": model})
    elif how == "from_pipe":
        pipeline = diffusers.FluxPipeline.from_pipe(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seeds[dist.get_rank()])
    pipeline(**small_pipelines.call_kwargs("flux"), generator=generator, output_type="np")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["load_pipeline", "model in a pipeline", "from_pipe"])
def test_a_pipeline_with_two_seeds_is_stopped(how: str, tmp_path: Path) -> None:
    """Pipelines, made in whatever way, stop at the first step when ranks are seeded apart."""
    small_pipelines.build_flux_pipeline().save_pretrained(tmp_path / "source")
    shardconv.convert(tmp_path / "source", tmp_path / "out", tp=2)
    ranks.values(call_pipeline, tmp_path / "out", how, [1, 1])
    outcome = ranks.same(ranks.run(call_pipeline, tmp_path / "out", how, [1, 2]))
    assert "different hidden_states" in outcome.text
