"""Every plan that could run and be wrong is refused, or warned about, before one weight byte is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import toys
from diffusers.hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel
from torch import nn
from toys import ATTENTION_PLAN, FFN, HEADS, INNER, PLAN, ToyTransformer

from shardconv import PlanError, ShardconvWarning, convert
from shardconv.format.plan import parse_plan
from shardconv.plans.auto_rows import auto_rows
from shardconv.plans.catalogue import small_models
from shardconv.plans.choice import class_plan
from shardconv.plans.resolve import resolve

FEED_FORWARD_PLAN = {key: style for key, style in PLAN.items() if key not in ATTENTION_PLAN}


def resolve_toy(
    plan: Mapping[str, object] | None = None,
    tp: int = 2,
    *,
    change: Callable[[Any], None] = lambda model: None,
    class_plan: Mapping[str, object] | None = None,
    **config: object,
) -> tuple[str, ...]:
    """Resolve `plan` (None: T's own) on the toy model altered by `change`; gives the warnings."""
    cls = type("ToyTransformer", (ToyTransformer,), {"change": staticmethod(change)})
    own = parse_plan(class_plan, "class") if class_plan else None
    return resolve(cls(**config), parse_plan(PLAN if plan is None else plan, "plan"), tp, own).warnings


def issues_of(*args: Any, **kwargs: Any) -> tuple[str, ...]:
    """The faults for which `resolve_toy` refuses."""
    with pytest.raises(PlanError) as caught:
        resolve_toy(*args, **kwargs)
    return caught.value.issues


def each_block(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """A change done to every block of the toy model."""

    def run(model: Any) -> None:
        for block in model.blocks:
            change(block)

    return run


def attribute(path: str, value: Callable[[], object]) -> Callable[[Any], None]:
    """Set an attribute, dotted from the block, in every block."""
    owner, _, leaf = path.rpartition(".")
    return each_block(lambda block: setattr(block.get_submodule(owner), leaf, value()))


def test_the_toy_plan_is_sound() -> None:
    """T itself resolves at every degree that divides it, without a warning; the tests below break it one way each."""
    for tp in (1, 2, 3, 4, 6, 8, 12, 24):
        assert resolve_toy(tp=tp) == ()


# --- C2: fused layers


def test_c2_plain_colwise_on_a_layer_that_carries_blocks_is_warned_about() -> None:
    """A layer with `_tp_packed_col_blocks` cut as plain colwise is warned about by name; packed, it is not."""
    fused = each_block(lambda block: setattr(block.ff.proj, "_tp_packed_col_blocks", [FFN // 2, FFN // 2]))
    assert resolve_toy(change=fused) == (
        "blocks.0.ff.proj: a fused layer cut as colwise, so that ranks pair parts of different blocks; packed_colwise "
        "is almost certainly meant",
    )
    assert resolve_toy(PLAN | {"blocks.*.ff.proj": {"style": "packed_colwise"}}, change=fused) == ()


def test_c2_plain_rowwise_on_a_layer_that_carries_blocks_is_warned_about() -> None:
    """So is a layer with `_tp_packed_row_blocks` cut as plain rowwise."""
    fused = each_block(lambda block: setattr(block.ff.out, "_tp_packed_row_blocks", [FFN // 4, 3 * FFN // 4]))
    (warning,) = resolve_toy(change=fused)
    assert warning.startswith("blocks.0.ff.out: a fused layer cut as rowwise")
    assert "packed_rowwise is almost certainly meant" in warning


def test_c2_plain_colwise_on_a_layer_that_the_class_packs_is_warned_about() -> None:
    """A plan that cuts plainly what the class's own plan packs is warned about."""
    packed = PLAN | {"blocks.*.ff.proj": PackedColwiseParallel([1, 1])}
    (warning,) = resolve_toy(PLAN, class_plan=packed)
    assert warning.startswith("blocks.0.ff.proj: a fused layer cut as colwise")


def test_c2_the_warning_does_not_depend_on_how_the_key_is_written() -> None:
    """Naming each block instead of writing `*` does not silence the warning about a layer that the class packs."""
    packed = PLAN | {"blocks.*.ff.proj": PackedColwiseParallel([1, 1])}
    spelled = {key.replace("*", str(i)): style for key, style in PLAN.items() for i in range(2)}
    warnings = resolve_toy(spelled, class_plan=packed)
    assert any(warning.startswith("blocks.0.ff.proj: a fused layer cut as colwise") for warning in warnings)


def test_c2_blocks_are_cut_each_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused gate and up projection: with the packed style each rank pairs gate rows with the up rows that belong to
    them, in order; [1, 1, 1, 3, 3] likewise."""
    model = toys.build(toys.install(monkeypatch), dtype=torch.float32)
    with torch.no_grad():
        model.blocks[0].ff.proj.weight[: FFN // 2] = 1
        model.blocks[0].ff.proj.weight[FFN // 2 :] = -1
        model.blocks[1].ff.proj.weight.copy_(torch.arange(FFN)[:, None].expand(FFN, INNER))
    toys.save(model, tmp_path / "in")
    plan = {key.replace("*", str(i)): style for key, style in PLAN.items() for i in range(2)}
    plan["blocks.0.ff.proj"] = {"style": "packed_colwise", "blocks": [1, 1]}
    plan["blocks.1.ff.proj"] = {"style": "packed_colwise", "blocks": [1, 1, 1, 3, 6]}
    with pytest.warns(ShardconvWarning, match=r"a layer cut in blocks"):  # other ones than T's class has
        convert(tmp_path / "in", tmp_path / "out", tp=2, plan=plan)
    for rank, state in enumerate(toys.rank_states(tmp_path / "out" / "tp2")):
        gate_up = state["blocks.0.ff.proj.weight"]
        assert torch.equal(gate_up, torch.tensor([1.0] * (FFN // 4) + [-1.0] * (FFN // 4))[:, None].expand(-1, INNER))
        rows = state["blocks.1.ff.proj.weight"][:, 0].tolist()
        expected = []
        for start, end in ((0, 64), (64, 128), (128, 192), (192, 384), (384, 768)):
            half = (end - start) // 2
            expected += list(range(start + rank * half, start + (rank + 1) * half))
        assert rows == expected


# --- C3: keys


def test_c3_a_key_that_matches_nothing_is_an_error() -> None:
    """A mistyped key is an error that names the first place where it should have matched."""
    assert issues_of(PLAN | {"blocks.*.attn.to_kv": "colwise"}) == (
        "plan key 'blocks.*.attn.to_kv': matches nothing in 2 of 2 places, the first is blocks.0.attn.to_kv; correct "
        "the key",
    )
    assert issues_of(PLAN | {"proj_on": "colwise"}) == (
        "plan key 'proj_on': matches nothing in 1 of 1 places, the first is proj_on; correct the key",
    )


def test_c3_a_key_that_matches_some_blocks_only_is_an_error() -> None:
    """A key that fits one of two blocks is an error: the other block would quietly stay whole."""

    def change(model: Any) -> None:
        del model.blocks[1].attn.to_q

    (issue,) = issues_of(change=change)
    assert issue.startswith("plan key 'blocks.*.attn.to_q': matches nothing in 1 of 2 places")
    assert "blocks.1.attn.to_q" in issue


def test_c3_digits_in_a_name_are_a_name() -> None:
    """A module called w1 is planned by that name, and a digit never counts as a pattern."""

    def change(block: Any) -> None:
        block.ff.w1 = nn.Linear(INNER, FFN)

    assert resolve_toy(PLAN | {"blocks.*.ff.w1": "colwise"}, change=each_block(change)) == ()
    (issue,) = issues_of(PLAN | {"blocks.*.ff.w2": "colwise"}, change=each_block(change))
    assert "matches nothing in 2 of 2 places, the first is blocks.0.ff.w2" in issue


def test_c3_two_keys_for_one_module_are_an_error() -> None:
    """Two keys that name one module are an error with both keys, even when the style is the same."""
    assert issues_of(PLAN | {"blocks.1.attn.to_q": "colwise"}) == (
        "blocks.1.attn.to_q: named by two plan keys, 'blocks.*.attn.to_q' and 'blocks.1.attn.to_q'; keep one",
    )


def test_c3_two_stars_are_an_error() -> None:
    """A key holds one `*`."""
    assert issues_of(PLAN | {"blocks.*.attn.*": "colwise"}) == (
        "plan key 'blocks.*.attn.*': expected at most one '*', found 2; write one key for each list",
    )


@pytest.mark.parametrize("key", ["blocks.*_norm.to_q", "blo*.attn.to_q"])
def test_c3_a_star_inside_a_name_is_an_error(key: str) -> None:
    """`*` stands for a whole name, never for a part of one."""
    assert issues_of(PLAN | {key: "colwise"}) == (f"plan key '{key}': expected '*' as a whole name between dots",)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("proj_in.*.to_q", "proj_in is Linear"),
        ("nothing.*.to_q", "nothing is nothing"),
        ("*.to_q", "the model itself is ToyTransformer"),
        ("table.*.to_q", "table is ModuleDict"),
    ],
)
def test_c3_a_star_needs_a_module_list(key: str, said: str) -> None:
    """`*` goes over an `nn.ModuleList` and nothing else; the message says what stands there."""

    def change(model: Any) -> None:
        model.table = nn.ModuleDict({"a": nn.Linear(8, 8)})

    assert issues_of(PLAN | {key: "colwise"}, change=change) == (
        f"plan key '{key}': expected an nn.ModuleList before '*', {said}",
    )


@pytest.mark.parametrize(("key", "kind"), [("blocks.*.attn.norm_q", "RMSNorm"), ("blocks.*.ff", "ToyFeedForward")])
def test_c3_only_linear_layers_are_cut(key: str, kind: str) -> None:
    """A key for anything but an `nn.Linear` is an error that says what it names."""
    (issue,) = issues_of(PLAN | {key: "colwise"})
    assert f": expected an nn.Linear, found {kind}; only Linear, convolution and norm layers are cut" in issue


def test_a_block_that_stands_in_two_places_is_no_double_key() -> None:
    """A model that reuses one block instance is planned like any other, as in diffusers; no key is called double."""

    def change(model: Any) -> None:
        model.blocks[1] = model.blocks[0]

    assert resolve_toy(change=change) == ()


# --- C4: norms of queries and keys


def _norm(make: Callable[[], nn.Module], *names: str) -> Callable[[Any], None]:
    return each_block(lambda block: [setattr(block.attn, name, make()) for name in names])


@pytest.mark.parametrize("make", [lambda: nn.RMSNorm(INNER), lambda: nn.LayerNorm(INNER),
                                  lambda: diffusers.models.normalization.RMSNorm(INNER, eps=1e-6)],
                         ids=["torch-rms", "layer", "diffusers-rms"])  # fmt: skip
def test_c4_a_norm_across_all_heads_is_refused_by_name(make: Callable[[], nn.Module]) -> None:
    """A query or key norm as wide as the sharded projection is refused: rank-local statistics would be wrong."""
    issues = issues_of(change=_norm(make, "norm_q", "norm_k"))
    assert [issue.split(": ")[0] for issue in issues] == ["blocks.0.attn.norm_q", "blocks.0.attn.norm_k"]
    assert all("a norm across all heads of a sharded projection" in issue for issue in issues)


@pytest.mark.parametrize("name", ["norm_added_q", "q_norm", "k_norm", "q_rms_norm", "query_norm", "ln_q", "img_q_norm"])
def test_c4_other_names_of_such_norms_are_refused_too(name: str) -> None:
    """Classes of diffusers call the norm by many names; each of them is caught."""
    (issue,) = issues_of(change=_norm(lambda: nn.RMSNorm(INNER), name))
    assert issue.startswith(f"blocks.0.attn.{name}: a norm across all heads")


def test_c4_a_norm_across_all_heads_without_a_weight_is_refused_too() -> None:
    """Without a weight the statistics are no less wrong."""
    (issue,) = issues_of(change=_norm(lambda: nn.RMSNorm(INNER, elementwise_affine=False), "norm_q"))
    assert issue.startswith("blocks.0.attn.norm_q: a norm across all heads")


def test_c4_a_norm_of_the_input_of_a_projection_is_fine() -> None:
    """A norm before the projection sees the whole input, whatever its width."""
    assert resolve_toy(change=_norm(lambda: nn.LayerNorm(INNER), "norm", "pre_norm_q")) == ()


def test_c4_a_norm_within_each_head_is_fine() -> None:
    """T's own norms, of one head's width, are no obstacle, and stay whole; nor is a wide one that no rank shares."""
    assert resolve_toy() == ()
    assert resolve_toy(tp=1, change=_norm(lambda: nn.RMSNorm(INNER), "norm_q")) == ()
    assert resolve_toy(FEED_FORWARD_PLAN, change=_norm(lambda: nn.RMSNorm(INNER), "norm_q")) == ()


def test_c4_wan_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real Wan transformer, whose norms go across heads, is refused under a plan that shards its attention."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=1, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "in")
    plan = tmp_path / "plan.json"
    plan.write_text('{"blocks.*.attn1.to_q": "colwise", "blocks.*.attn1.to_k": "colwise", '
                    '"blocks.*.attn1.to_v": "colwise", "blocks.*.attn1.to_out.0": "rowwise"}')  # fmt: skip
    message = toys.refused(capsys, PlanError, tmp_path / "in", tmp_path / "out", tp=2, plan=plan)
    assert "blocks.0.attn1.norm_q: a norm across all heads" in message
    assert "blocks.0.attn1.norm_k: a norm across all heads" in message


# --- C5, C6: what does not divide


def test_c5_heads_that_do_not_divide_are_refused() -> None:
    """24 heads on 5 ranks: the place of the count, the count, and the degrees that work."""
    assert issues_of(ATTENTION_PLAN, 5)[0] == (
        "config.json num_attention_heads: 24 heads, not divisible by tp degree 5; use 1, 2, 3, 4, 6, 8, 12"
    )


def test_c5_a_dim_that_does_not_divide_is_refused() -> None:
    """A layer of 50 outputs on 4 ranks, an FFN of 770 on 4: layer, dim and degrees are named."""

    def change(block: Any) -> None:
        block.ff.proj, block.ff.out = nn.Linear(INNER, 770), nn.Linear(770, INNER)
        block.side, block.back = nn.Linear(INNER, 50), nn.Linear(50, INNER)

    plan = PLAN | {"blocks.*.side": "colwise", "blocks.*.back": "rowwise"}
    assert issues_of(plan, 4, change=each_block(change)) == (
        "blocks.0.ff.proj.weight: dim 0 is 770, not divisible by tp degree 4; use 1, 2 (likewise 1 more layers)",
        "blocks.0.ff.out.weight: dim 1 is 770, not divisible by tp degree 4; use 1, 2 (likewise 1 more layers)",
        "blocks.0.side.weight: dim 0 is 50, not divisible by tp degree 4; use 1, 2 (likewise 1 more layers)",
        "blocks.0.back.weight: dim 1 is 50, not divisible by tp degree 4; use 1, 2 (likewise 1 more layers)",
    )


def test_c6_a_block_that_does_not_divide_is_refused_though_the_sum_does() -> None:
    """Three blocks of 64 rows on 3 ranks: 192 divides by 3, each block does not, and the block is named."""
    plan = FEED_FORWARD_PLAN | {"blocks.*.ff.proj": {"style": "packed_colwise", "blocks": [1, 1, 1]}}

    def change(block: Any) -> None:
        block.ff.proj, block.ff.out = nn.Linear(INNER, 192), nn.Linear(192, INNER)

    assert issues_of(plan, 3, change=each_block(change)) == (
        "blocks.0.ff.proj.weight: dim 0 is packed in blocks [64, 64, 64], block 0 is 64, not divisible by tp degree 3; "
        "use 1, 2, 4, 8 (likewise 1 more layers)",
    )


def test_c6_the_first_block_at_fault_is_named() -> None:
    """Of blocks 96, 40 and 56 on 3 ranks it is the second that does not divide."""
    plan = FEED_FORWARD_PLAN | {"blocks.*.ff.out": {"style": "packed_rowwise", "blocks": [12, 5, 7]}}

    def change(block: Any) -> None:
        block.ff.proj, block.ff.out = nn.Linear(INNER, 192), nn.Linear(192, INNER)

    (issue,) = issues_of(plan, 3, change=each_block(change))
    assert "dim 1 is packed in blocks [96, 40, 56], block 1 is 40, not divisible by tp degree 3" in issue


def test_blocks_whose_sum_does_not_divide_the_dim_are_refused() -> None:
    """Proportions that do not add up to a divisor of the dim are refused with dim, blocks and sum."""
    plan = PLAN | {"blocks.*.ff.proj": {"style": "packed_colwise", "blocks": [1, 2, 2]}}
    assert issues_of(plan) == (
        f"blocks.0.ff.proj: dim 0 is {FFN}, blocks [1, 2, 2] have the sum 5, which does not divide it; correct the "
        "blocks (likewise 1 more of 'blocks.*.ff.proj')",
    )


@pytest.mark.parametrize(
    ("style", "layer", "name"),
    [("packed_colwise", "proj", "_tp_packed_col_blocks"), ("packed_rowwise", "out", "_tp_packed_row_blocks")],
)
def test_packed_without_blocks_needs_them_on_the_layer(style: str, layer: str, name: str) -> None:
    """A packed style without numbers takes them from the `Linear`; absent or of the wrong sum, it is refused."""
    plan = PLAN | {f"blocks.*.ff.{layer}": style}
    (issue,) = issues_of(plan)
    assert issue.startswith(
        f"blocks.0.ff.{layer}: {style} without blocks, and the Linear carries no {name}; give blocks"
    )
    wrong = attribute(f"ff.{layer}.{name}", lambda: [FFN, FFN])
    dim = 0 if layer == "proj" else 1
    (issue,) = issues_of(plan, change=wrong)
    assert issue.startswith(
        f"blocks.0.ff.{layer}: {name} [{FFN}, {FFN}] have the sum {2 * FFN}, expected dim {dim}, {FFN}"
    )
    assert resolve_toy(plan, change=attribute(f"ff.{layer}.{name}", lambda: [FFN // 4, 3 * FFN // 4])) == ()


# --- C8, C15, C12: what is left out of the plan


def test_c8_a_gate_with_one_output_a_head_must_be_planned() -> None:
    """A per-head gate beside sharded projections, left out of the plan, is refused by name; planned, it is fine."""
    gate = attribute("attn.gate", lambda: nn.Linear(INNER, HEADS))
    assert issues_of(change=gate) == (
        f"blocks.0.attn.gate: one output a head ({HEADS}) beside sharded projections, and not in the plan; add it as "
        "colwise",
    )
    assert resolve_toy(PLAN | {"blocks.*.attn.gate": "colwise"}, change=gate) == ()


@pytest.mark.parametrize("left", ["blocks.*.attn.to_out.0", "blocks.*.ff.out"])
def test_c15_a_colwise_layer_that_nothing_sums_up_is_refused(left: str) -> None:
    """Sharded projections whose output projection stays replicated would give partial sums for whole ones."""
    issues = issues_of({key: style for key, style in PLAN.items() if key != left})
    owner = left.split(".")[2]
    names = {"attn": ["to_q", "to_k", "to_v"], "ff": ["proj"]}[owner]
    assert [issue.split(": ")[0] for issue in issues] == [f"blocks.0.{owner}.{name}" for name in names]
    assert all("no rowwise module joins its output" in issue for issue in issues)


def test_c15_each_block_needs_its_own_pair() -> None:
    """A rowwise layer in one block does not sum up the colwise layers of another, however the keys are written."""
    assert issues_of({"blocks.0.ff.proj": "colwise", "blocks.1.ff.out": "rowwise"}) == (
        "blocks.1.ff.out: rowwise, but nothing in its block is colwise, so its input is whole; use rowwise_split_input",
        "blocks.0.ff.proj: colwise, but no rowwise module joins its output, so partial results would be taken for "
        "whole ones; plan the projection that follows it",
    )


def test_c15_a_layer_outside_the_blocks_does_not_sum_up_those_inside() -> None:
    """A rowwise layer of the model itself is no pair for the colwise layers of its blocks."""
    plan = {"blocks.*.ff.proj": "colwise", "time_embedder": "rowwise"}
    assert [issue.split(",")[0] for issue in issues_of(plan)] == ["time_embedder: rowwise", "blocks.0.ff.proj: colwise"]


def test_c15_a_pair_may_be_written_in_two_ways() -> None:
    """A colwise key with `*` and rowwise keys that name each block make a pair all the same."""
    spelled = {f"blocks.{i}.ff.out": "rowwise" for i in range(2)}
    assert resolve_toy({"blocks.*.ff.proj": "colwise"} | spelled) == ()
    every = {key.replace("*", str(i)): style for key, style in PLAN.items() for i in range(2)}
    assert resolve_toy(every) == ()


def test_c12_a_rowwise_layer_whose_input_is_whole_is_refused_with_the_right_style() -> None:
    """Nothing colwise before it: its input is whole, and rowwise_split_input is what is meant."""
    modulation = attribute("modulation", lambda: nn.Linear(INNER, 6 * INNER))
    plan = {"blocks.*.modulation": "rowwise"}
    assert issues_of(plan, change=modulation) == (
        "blocks.0.modulation: rowwise, but nothing in its block is colwise, so its input is whole; use "
        "rowwise_split_input",
    )
    assert resolve_toy({"blocks.*.modulation": "rowwise_split_input"}, change=modulation) == ()
    assert resolve_toy(PLAN | {"blocks.*.modulation": "rowwise_split_input"}, change=modulation) == ()


# --- C10: styles


@pytest.mark.parametrize("style", ["embedding_rowwise", "replicate", "Colwise", "", None, 3, [], object()])
def test_c10_an_unknown_style_names_key_style_and_what_is_supported(style: object) -> None:
    """A style this tool does not know is refused with its key and the whole list of styles that it does."""
    with pytest.raises(PlanError) as caught:
        resolve_toy(PLAN | {"blocks.*.ff.proj": style})
    assert str(caught.value) == (
        f"plan: 'blocks.*.ff.proj': unknown style {style!r}; supported: colwise, rowwise, rowwise_split_input, "
        "packed_colwise, packed_rowwise, norm_across_heads, vocabulary, parameter, rowwise_rep"
    )


def test_c10_known_aliases_and_objects_are_taken() -> None:
    """transformers' name for a rowwise layer with whole input and diffusers' packed objects mean our styles."""
    plan = parse_plan({"a": "rowwise_rep", "b": PackedColwiseParallel([1, 3]), "c": PackedRowwiseParallel()}, "plan")
    assert {key: (rule.style.value, rule.blocks) for key, rule in plan.items()} == {
        "a": ("rowwise_split_input", None), "b": ("packed_colwise", (1, 3)), "c": ("packed_rowwise", None)
    }  # fmt: skip


def test_c10_a_plan_of_ones_own_helps_where_the_class_has_an_unknown_style(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a newer diffusers gives a class a style we lack, `plan` still converts the model in ours."""
    model = toys.build(toys.install(monkeypatch, _tp_plan=PLAN | {"proj_in": "embedding_rowwise"}))
    toys.save(model, tmp_path / "in")
    with pytest.raises(PlanError, match="embedding_rowwise"):
        convert(tmp_path / "in", tmp_path / "out", tp=2)
    convert(tmp_path / "in", tmp_path / "out", tp=2, plan=PLAN)
    assert len(toys.rank_files(tmp_path / "out" / "tp2")) == 2


@pytest.mark.parametrize("text", ["{}", "[]", "null", '"colwise"', "{", '{"a": "colwise", "a": "rowwise"}'])
def test_an_empty_plan_is_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """A plan file without a key would shard nothing: refused by name, as is what is no map or has a key twice."""
    toys.save(toys.build(toys.install(monkeypatch)), tmp_path / "in")
    path = tmp_path / "plan.json"
    path.write_text(text)
    message = toys.refused(capsys, PlanError, tmp_path / "in", tmp_path / "out", tp=2, plan=path)
    assert message.startswith(f"{path}: ")


# --- C11: tied parameters under a plan


def test_c11_a_tie_with_one_planned_side_is_refused() -> None:
    """A parameter with two names of which the plan cuts one is refused, naming both."""

    def change(model: Any) -> None:
        model.head = nn.Linear(INNER, FFN)
        model.embed = nn.Linear(INNER, FFN)
        model.embed.weight = model.head.weight
        model.last = nn.Linear(FFN, INNER)

    head = PLAN | {"head": "colwise", "last": "rowwise"}
    assert issues_of(head, change=change) == (
        "head.weight: tied to embed.weight, which the plan does not cut in the same way; plan both or neither",
    )
    assert resolve_toy(head | {"embed": "colwise"}, change=change) == ()
    assert resolve_toy(change=change) == ()


# --- head counts in the attention code


def test_an_attention_class_that_stores_its_head_count_is_refused_unless_listed() -> None:
    """Whether unlisted attention code divides by the count is not known: refused by name, except on one rank."""
    heads = attribute("attn.heads", lambda: HEADS)
    (issue,) = issues_of(change=heads)
    assert issue.startswith(
        "ToyTransformer: blocks.0.attn.heads is a head count, and whether the attention code divides"
    )
    assert resolve_toy(tp=1, change=heads) == ()
    assert resolve_toy(FEED_FORWARD_PLAN, change=heads) == ()


def test_a_listed_class_with_head_counts_is_taken() -> None:
    """The supported classes store head counts too, and are listed with what becomes local."""
    for name in small_models.NAMES:
        model = small_models.build(name)
        assert resolve(model, parse_plan(type(model)._tp_plan, "plan"), 2).modules


def test_kv_heads_are_checked_like_heads() -> None:
    """6 key/value heads on 4 ranks are refused although the query heads divide; in the config and on the module."""
    assert issues_of(ATTENTION_PLAN, 4, num_key_value_heads=6)[0] == (
        "config.json num_key_value_heads: 6 heads, not divisible by tp degree 4; use 1, 2, 3, 6"
    )
    issues = issues_of(ATTENTION_PLAN, 4, change=attribute("attn.kv_heads", lambda: 6))
    assert "blocks.0.attn.kv_heads: 6 heads, not divisible by tp degree 4; use 1, 2, 3, 6" in issues


# --- everything at once, and the degrees on offer


def test_all_faults_of_a_plan_stand_in_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Faults of plan, checkpoint and target are told together, not one a run."""
    model = toys.build(toys.install(monkeypatch, _tp_plan=PLAN | {"blocks.*.attn.to_kv": "colwise", "nope": "rowwise"}))
    toys.save(model, tmp_path / "in")
    toys.edit_json(tmp_path / "in" / "config.json", num_layers=3)
    out = tmp_path / "out"
    out.mkdir()
    (out / toys.SINGLE).write_bytes(b"of another model")
    message = toys.refused(capsys, toys.ShardconvError, tmp_path / "in", out, tp=2)
    assert "plan key 'blocks.*.attn.to_kv': matches nothing in 3 of 3 places" in message
    assert "plan key 'nope': matches nothing in 1 of 1 places" in message
    assert "blocks.2.attn.to_q.weight: the model has it, the checkpoint does not" in message
    assert f"{out / toys.SINGLE}: ordinary weights" in message


@pytest.mark.parametrize("plan", [PLAN, FEED_FORWARD_PLAN], ids=["all", "feed-forward"])
def test_c5_the_degrees_on_offer_are_exactly_those_that_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Mapping[str, object]
) -> None:
    """Every degree up to 16 that the message offers converts, and every one that it leaves out is refused with it."""
    model = toys.build(toys.install(monkeypatch, _tp_plan=plan), num_layers=1)
    toys.save(model, tmp_path / "in")
    with pytest.raises(PlanError) as caught:
        convert(tmp_path / "in", tmp_path / "out", tp=5)
    offers = {re.search(r"; use ([\d, ]+)", issue)[1].strip() for issue in caught.value.issues}
    assert len(offers) == 1
    offered = [int(degree) for degree in offers.pop().split(", ")]
    assert offered == [1, 2, 3, 4, 6, 8, 12]
    for tp in range(1, 17):
        if tp in offered:
            convert(tmp_path / "in", tmp_path / "out", tp=tp)
            assert len(toys.rank_files(tmp_path / "out" / f"tp{tp}")) == tp
        else:
            with pytest.raises(PlanError, match=f"not divisible by tp degree {tp}; use 1, 2, 3, 4, 6, 8, 12"):
                convert(tmp_path / "in", tmp_path / "out", tp=tp)


def test_warnings_of_a_plan_reach_the_caller_and_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Advice about a plan is a `ShardconvWarning` for a library call, and a line on stderr on the command line."""
    fused = each_block(lambda block: setattr(block.ff.proj, "_tp_packed_col_blocks", [FFN // 2, FFN // 2]))
    toys.save(toys.build(toys.install(monkeypatch, fused)), tmp_path / "in")
    with pytest.warns(ShardconvWarning, match=r"blocks\.0\.ff\.proj: a fused layer") as caught:
        convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    capsys.readouterr()
    assert toys.main(toys.arguments(tmp_path / "in", tmp_path / "out", tp=4)) == 0
    assert capsys.readouterr().err.startswith("warning: blocks.0.ff.proj: a fused layer cut as colwise")


def test_c2_blocks_that_the_class_does_not_have_are_warned_about() -> None:
    """Blocks on a layer that the class cuts whole, or other blocks than its own, give a warning that names both."""
    gated = PLAN | {"blocks.*.ff.proj": PackedColwiseParallel([1, 1])}
    (warning,) = resolve_toy(gated, class_plan=PLAN)
    assert re.fullmatch(r"blocks\.0\.ff\.proj: a layer cut in blocks .*; \[\d+\] is almost certainly meant", warning)
    thirds = PLAN | {"blocks.*.ff.proj": PackedColwiseParallel([1, 2])}
    (warning,) = resolve_toy(thirds, class_plan=gated)
    assert re.fullmatch(r"blocks\.0\.ff\.proj: a layer cut in .*; \[\d+, \d+\] is almost certainly meant", warning)


@pytest.mark.parametrize("forgotten", ["to_k", "to_v"])
def test_c15_an_attention_is_planned_whole_or_not_at_all(forgotten: str) -> None:
    """Queries without their keys or values would be of other heads: the forgotten projection is named, once."""
    plan = {key: style for key, style in PLAN.items() if not key.endswith(forgotten)}
    (issue,) = issues_of(plan)
    assert issue.startswith(
        f"blocks.0.attn.{forgotten}: not in the plan, while other projections of the same attention"
    )


def test_auto_rows_is_right_for_fused_layers_too() -> None:
    """A layer that the class packs may be cut anywhere when its input is whole: no warning."""
    model = small_models.build("flux")
    plan = auto_rows(model, 2)
    assert resolve(model, plan, 2, class_plan(model)).warnings == ()


def test_auto_rows_needs_a_layer_that_divides() -> None:
    """A degree that divides no layer's input is said, instead of an empty plan."""
    with pytest.raises(PlanError, match=r"^FluxTransformer2DModel: tp degree 7 divides the input of no Linear"):
        auto_rows(small_models.build("flux"), 7)
