"""Faults put in on purpose are seen: the comparison of `test_run_models` is worth something. And the styles alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import ranks
import small_sets
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_run_models import FP32_TOLERANCE
from torch import nn

import loader
from loader import parallel
from loader.layers import attention as fixups
from loader.layers import linear
from shardconv.format.cut import Cut

SEEN = 100 * FP32_TOLERANCE  # a fault must differ by this much at least, of the largest output

# --- one fault each, put in around `parallelize` or the forward pass of a small model ---


def difference_of(name: str, fault: Callable[[], Any], plan: dict[str, object] | None = None) -> float:
    """On each rank: the difference between the sharded model, with `fault` in force, and the unsharded one."""
    expected = small_sets.outputs(small_sets.build(name), name)
    plan = plan or small_sets.PLANS.get(name)
    with fault():
        model = loader.parallelize(small_sets.build(name), plan=plan)
        return small_sets.difference(small_sets.outputs(model, name), expected)


no_fault = contextlib.nullcontext


def bias_before_the_sum() -> Any:
    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(F.linear(x, self.weight, self.bias), self.group_name)

    return mock.patch.object(linear.RowwiseLinear, "forward", forward)


def no_sum() -> Any:
    return mock.patch.object(linear.RowwiseLinear, "forward", nn.Linear.forward)


def all_reduce(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    reduced = torch.ops._c10d_functional.all_reduce(tensor, "sum", group_name)
    return torch.ops._c10d_functional.wait_tensor(reduced)


def rows_of_the_next_rank() -> Any:
    take = parallel.take_slice

    def shifted(tensor: torch.Tensor, cut: Cut, rank: int, tp: int) -> torch.Tensor:
        return take(tensor, cut, (rank + 1) % tp if cut.dim == 0 else rank, tp)

    return mock.patch.object(parallel, "take_slice", shifted)


def columns_of_the_next_rank() -> Any:
    take = parallel.take_slice

    def shifted(tensor: torch.Tensor, cut: Cut, rank: int, tp: int) -> torch.Tensor:
        return take(tensor, cut, (rank + 1) % tp if cut.dim == 1 else rank, tp)

    return mock.patch.object(parallel, "take_slice", shifted)


def first_inputs_on_every_rank() -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return linear.RowwiseLinear.forward(self, x.narrow(-1, 0, self.in_features))

    return mock.patch.object(linear.RowwiseSplitInputLinear, "forward", forward)


def one_block() -> Any:
    def ranges(self: Cut, rank: int, tp: int) -> Any:
        part = sum(self.block_sizes) // tp
        yield rank * part, (rank + 1) * part

    return mock.patch.object(Cut, "ranges", ranges)


def whole_head_count() -> Any:
    return mock.patch.object(fixups, "local_attributes", return_value=[])


def perturbed_replica() -> Any:
    apply = parallel.apply

    def perturb(model: Any, modules: Any, ranks_: Any) -> None:
        apply(model, modules, ranks_)
        if dist.get_rank() == 1:
            model.transformer_blocks[0].attn.norm_q.weight.data.mul_(1.5)  # held whole by every rank

    return mock.patch.object(parallel, "apply", perturb)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*small_sets.NAMES])
def test_without_a_fault_the_comparison_is_quiet(name):
    """The set-up of the tests below finds nothing when nothing is broken."""
    assert max(ranks.values(difference_of, name, no_fault)) <= FP32_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param("qwenimage", rows_of_the_next_rank, id="colwise-rank-off-by-one"),
        pytest.param("qwenimage", columns_of_the_next_rank, id="rowwise-rank-off-by-one"),
        pytest.param("qwenimage", bias_before_the_sum, id="rowwise-bias-on-every-rank"),
        pytest.param("qwenimage21", no_sum, id="rowwise-never-summed"),
        pytest.param("minimax", first_inputs_on_every_rank, id="split-input-always-rank-0"),
        pytest.param("minimax", one_block, id="packed-colwise-as-one-block"),
        pytest.param("flux2", one_block, id="packed-both-as-one-block"),
        pytest.param("flux", one_block, id="packed-rowwise-as-one-block"),
        pytest.param("flux", perturbed_replica, id="replicated-differs-on-one-rank"),
    ],
)
def test_a_fault_in_a_style_is_seen(name, fault):
    """Each style broken in its own way changes the output far beyond the tolerance."""
    assert max(ranks.values(difference_of, name, fault)) > SEEN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "doctored"),
    [
        pytest.param("flux2", {"transformer_blocks.*.ff.linear_in": "colwise"}, id="packed-colwise-proportions"),
        pytest.param("flux2", {"single_transformer_blocks.*.attn.to_qkv_mlp_proj": "colwise"}, id="packed-colwise"),
        pytest.param("flux2", {"single_transformer_blocks.*.attn.to_out": "rowwise"}, id="packed-rowwise"),
        pytest.param("flux", {"single_transformer_blocks.*.proj_out": "rowwise"}, id="packed-rowwise-flux"),
        pytest.param("minimax", {"transformer_blocks.*.ff.net.0.proj": "colwise"}, id="packed-colwise-plan-file"),
    ],
)
def test_c2_a_plain_style_on_a_fused_layer_is_seen(name, doctored):
    """A plan that cuts a fused layer as one block runs and gives something else (C2)."""
    own = small_sets.PLANS.get(name) or type(small_sets.build(name))._tp_plan
    assert max(ranks.values(difference_of, name, no_fault, {**own, **doctored})) > SEEN


@pytest.mark.slow
def test_a_head_count_left_whole_is_seen():
    """MiniMax attention that divides by the whole head count fails or gives something else, never the right output."""
    for outcome in ranks.run(difference_of, "minimax", whole_head_count):
        assert outcome.error == "RuntimeError" or outcome.value > SEEN


# --- the styles alone, on toys whose faults cannot hide ---

WIDTH, HIDDEN = 24, 48


class Toy(nn.Module):
    """A rowwise layer after a colwise one, or a layer that splits its input; the biases are 100."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.split = nn.Linear(WIDTH, WIDTH, bias=bias)
        fill(self, 3)
        for layer in (self.down, self.split):
            if bias:
                nn.init.constant_(layer.bias, 100.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(torch.relu(self.up(x))), self.split(x)


class Gated(nn.Module):
    """Gate and up in one projection, the gate's rows +1 and the up rows -1 (times a row of its own)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        fill(self, 4)
        signs = torch.tensor([1.0, -1.0]).repeat_interleave(HIDDEN)
        scale = torch.arange(1, HIDDEN + 1).repeat(2) / HIDDEN
        with torch.no_grad():
            self.gate_up.weight.copy_((signs * scale)[:, None].expand(-1, WIDTH))
            self.gate_up.bias.copy_(signs)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return (self.down(torch.sigmoid(gate) * up),)


class Fused(nn.Module):
    """q, k, v and a gated feed-forward in one projection, blocks [1, 1, 1, 3, 3]; attention and feed-forward out in
    another, blocks [1, 3]. The split follows the width found, as in Flux2."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(WIDTH, 9 * 8)
        self.out = nn.Linear(8 + 24, WIDTH)
        fill(self, 5)
        nn.init.constant_(self.out.bias, 100.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        fused = self.fused(x)
        unit = fused.shape[-1] // 9
        q, k, v, gate, up = fused.split([unit, unit, unit, 3 * unit, 3 * unit], dim=-1)
        return (self.out(torch.cat([q * k + v, torch.relu(gate) * up], dim=-1)),)


PLANS = {
    Toy: {"up": "colwise", "down": "rowwise", "split": "rowwise_split_input"},
    Gated: {"gate_up": {"style": "packed_colwise", "blocks": [1, 1]}, "down": "rowwise"},
    Fused: {
        "fused": {"style": "packed_colwise", "blocks": [1, 1, 1, 3, 3]},
        "out": {"style": "packed_rowwise", "blocks": [1, 3]},
    },
}


def fill(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def toy_difference(kind: type[nn.Module], args: tuple[Any, ...], plan: dict[str, object]) -> float:
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        expected = list(kind(*args)(x))
        return small_sets.difference(list(loader.parallelize(kind(*args), plan=plan)(x)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_c1_c12_rowwise_and_split_input_equal_the_plain_linear(bias, tp):
    """With biases of 100, and with none, rowwise (C1) and rowwise_split_input (C12) give what one rank gives."""
    assert max(ranks.values(toy_difference, Toy, (bias,), PLANS[Toy], n=tp)) <= FP32_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", [Gated, Fused])
def test_c2_packed_blocks_are_cut_each_on_its_own(kind, tp):
    """Gate and up of opposite sign, and [1, 1, 1, 3, 3] with [1, 3], give what one rank gives (C2)."""
    assert max(ranks.values(toy_difference, kind, (), PLANS[kind], n=tp)) <= FP32_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "key", "style"), [(Gated, "gate_up", "colwise"), (Fused, "out", "rowwise")])
def test_c2_packed_toys_under_a_plain_style_are_wrong(kind, key, style):
    """The toys tell packed from plain: cut as one block they give something else (C2)."""
    plan = {**PLANS[kind], key: style}
    assert max(ranks.values(toy_difference, kind, (), plan)) > SEEN
