"""Every class of the catalogue: sharded output equals unsharded output. A class is in it only while this passes."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import pytest
import ranks
import torch
from safetensors.torch import load_file

import shardconv
from shardconv.commands.merge import merge
from shardconv.errors import PlanError
from shardconv.format.plan import Rule, Style
from shardconv.libraries.choose import LIBRARIES, library_of
from shardconv.plans.catalogue import ENTRIES, cases
from shardconv.plans.choice import class_plan
from shardconv.plans.resolve import resolve

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
    pytest.mark.filterwarnings("ignore:.*its plan was checked with diffusers"),
]

TOLERANCE = 1e-5  # of the largest output, fp32; measured: at most 1.6e-06, on 2 and on 4 ranks
SEEN = 100 * TOLERANCE  # a fault must differ by this much at least
BF16_TOLERANCE = 0.03  # a step of bf16 is 0.004
NAMES = [name for name in sorted(ENTRIES) if any(library.find(name) for library in LIBRARIES)]  # older ones have fewer


@functools.cache
def folder() -> Path:
    """Removed when the interpreter ends."""
    global _kept
    _kept = tempfile.TemporaryDirectory(prefix="shardconv-catalogue-")
    return Path(_kept.name)


@functools.cache
def built(name: str) -> Any:
    """The small model of a class, norms' weights far from 1 and biases far from 0."""
    return cases.build(name)


@functools.cache
def expected(name: str) -> list[torch.Tensor]:
    """What it gives unsharded."""
    return cases.outputs(built(name), cases.inputs(built(name)))


@functools.cache
def source(name: str) -> Path:
    """The small model as diffusers saves it."""
    built(name).save_pretrained(folder() / name / "source")
    return folder() / name / "source"


@functools.cache
def converted(name: str, tp: int) -> Path:
    """What `convert` makes of it, without a plan being given."""
    shardconv.convert(source(name), folder() / name / "out", tp=tp)
    return folder() / name / "out"


def test_every_class_has_a_case() -> None:
    """Each entry has its small case, and no case is without an entry."""
    assert set(ENTRIES) == set(cases.CASES)
    assert len(ENTRIES) >= 65


@functools.cache
def differences(tp: int) -> dict[str, dict[str, float | str]]:
    """What `tp` ranks, which share one process group, find of every class: the worst rank's difference for each way to
    shard, or how it failed."""
    import catalogue_ranks

    given = [(name, converted(name, tp), expected(name)) for name in NAMES]
    return ranks.values(catalogue_ranks.compare_each, given, n=tp, timeout=300)[0]


def is_small(difference: float | str) -> bool:
    """Whether it is a difference at all, and one of rounding."""
    assert isinstance(difference, float), difference
    return difference <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sharded_output_equals_unsharded_on_2_ranks(name: str) -> None:
    """Converted without naming a plan and loaded, the model gives on every rank what it gives unsharded, and on all of
    them the same to the bit (C4)."""
    assert is_small(differences(2)[name]["set"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sharded_output_equals_unsharded_on_4_ranks(name: str) -> None:
    """The same on 4 ranks."""
    assert is_small(differences(4)[name]["set"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if ENTRIES[name].lean])
def test_lean_output_equals_unsharded(name: str) -> None:
    """With modulation and embedders cut too, the output is the same."""
    assert is_small(differences(2)[name]["lean"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_auto_rows_output_equals_unsharded(name: str) -> None:
    """Under `auto-rows` every class gives the same output, with no knowledge of it but the layers it reads itself."""
    assert is_small(differences(2)[name]["auto-rows"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_slices_are_exact_and_merge_gives_the_source_back(name: str) -> None:
    """Every slice is bit for bit what plain torch cuts, and merging the set gives the source's tensors back."""
    out = converted(name, 2)
    whole = load_file(source(name) / f"{library_of(type(built(name))).weight_stem}.safetensors")
    manifest = shardconv.Manifest.read(out / "tp2")
    states = [load_file(path) for path in sorted((out / "tp2").glob("rank-*"))]
    states.append(load_file(out / "tp2" / "replicated.safetensors"))
    for tensor in manifest.tensors:
        if tensor.cut is None:
            assert torch.equal(states[2][tensor.name], whole[tensor.name])
            continue
        blocks = whole[tensor.name].split(list(tensor.cut.block_sizes), dim=tensor.cut.dim)
        for rank in range(2):
            mine = torch.cat([block.chunk(2, dim=tensor.cut.dim)[rank] for block in blocks], dim=tensor.cut.dim)
            assert torch.equal(states[rank][tensor.name], mine)
    merge(out / "tp2", folder() / name / "merged")
    merged = load_file(folder() / name / "merged" / f"{library_of(type(built(name))).weight_stem}.safetensors")
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[key], whole[key]) for key in whole)


# --- each kind of fix-up is needed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        # these five run without an error under a bare plan
        ("PixArtTransformer2DModel", "heads left whole"),
        ("AllegroTransformer3DModel", "heads left whole"),
        ("LatteTransformer3DModel", "heads left whole"),
        ("SanaTransformer2DModel", "heads left whole"),
        ("SD3Transformer2DModel", "heads left whole"),
        ("OvisImageTransformer2DModel", "heads left whole"),
        ("WanTransformer3DModel", "norm left local"),
        ("LuminaNextDiT2DModel", "norm left local"),
        ("AnyFlowTransformer3DModel", "norm left local"),
        ("LTXVideoTransformer3DModel", "rope left whole"),
        ("LTX2VideoTransformer3DModel", "rope of rank 0"),
        ("NucleusMoEImageTransformer2DModel", "experts not summed"),
        ("SanaTransformer2DModel", "convolution not summed"),
    ],
)
def test_without_a_fix_up_the_output_is_wrong(name: str, fault: str) -> None:
    """Each kind of fix-up, left out, is an error or a difference far beyond the tolerance (C4)."""
    import catalogue_ranks

    config = {"qk_norm": None} if name.startswith("SD3") else {}
    assert max(ranks.values(catalogue_ranks.compare_without, name, "none", config)) <= TOLERANCE
    for found in ranks.values(catalogue_ranks.compare_without, name, fault, config):
        assert found in ("RuntimeError", "LoadError") or found > SEEN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("MochiTransformer3DModel", "pos_frequencies"),
        ("LuminaNextDiT2DModel", "layers.*.gate"),
        ("HeliosTransformer3DModel", "blocks.*.attn1.history_key_scale"),
        ("NucleusMoEImageTransformer2DModel", "experts.down_proj"),
    ],
)
def test_a_bare_parameter_left_whole_is_an_error(name: str, key: str) -> None:
    """A parameter with a value for each head, left out of the plan, does not fit the local heads."""
    import catalogue_ranks

    plan = class_plan(built(name))
    rest = {pattern: rule for pattern, rule in plan.items() if not pattern.endswith(key)}
    assert len(rest) < len(plan)
    outcomes = ranks.run(catalogue_ranks.compare, name, cases.CASES[name].config, rest)
    assert all(each.error in ("RuntimeError", "LoadError") or each.value > SEEN for each in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_convolutions_with_biases_equal_the_whole_ones(tp: int) -> None:
    """Packed, depthwise and rowwise convolutions with biases of 100, which take part once."""
    import catalogue_ranks

    assert max(ranks.values(catalogue_ranks.compare_convolutions, n=tp)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SanaWMLTX2RefinerTransformer3DModel", "WanAnimate2Transformer3DModel"])
def test_a_cache_between_calls_holds_local_heads(name: str) -> None:
    """Where a call leaves keys and values for the next, each rank keeps and finds those of its own heads."""
    import catalogue_ranks

    assert max(ranks.values(catalogue_ranks.compare_cached, name)) <= TOLERANCE


# --- dtypes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["WanTransformer3DModel", "AnyFlowTransformer3DModel", "LuminaNextDiT2DModel"])
def test_norms_keep_their_dtype_rules(name: str) -> None:
    """In bf16 the three kinds of norm across heads give what the unsharded ones give, to the steps of bf16."""
    import catalogue_ranks

    found = ranks.values(catalogue_ranks.compare, name, cases.CASES[name].config, None, torch.bfloat16)
    assert max(found) <= BF16_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["WanTransformer3DModel", "LTXVideoTransformer3DModel", "LuminaNextDiT2DModel", "SanaTransformer2DModel"],
)
def test_a_block_compiles_as_one_graph(name: str) -> None:
    """Norms across ranks, sliced rope tables and cut convolutions are traced by torch.compile without a break."""
    import catalogue_ranks

    for graphs, difference in ranks.values(catalogue_ranks.compile_block, name):
        assert graphs == 1
        assert difference <= TOLERANCE


def test_norms_of_each_head_stay_whole() -> None:
    """The same names may hold norms across heads or of each head, by config; only the former are cut."""
    case = cases.CASES["SanaTransformer2DModel"]
    across = class_plan(cases.build("SanaTransformer2DModel"))
    without = class_plan(cases.build("SanaTransformer2DModel", {**case.config, "qk_norm": None}))
    assert set(across) - set(without) == {f"transformer_blocks.*.attn{i}.norm_{x}" for i in (1, 2) for x in "qk"}
    sd3 = cases.build("SD3Transformer2DModel")
    plan = {**class_plan(sd3), "transformer_blocks.*.attn.norm_q": Rule(Style.NORM_ACROSS_HEADS)}
    with pytest.raises(PlanError, match=r"attn.norm_q: is not as wide as a projection beside it"):
        resolve(sd3, plan, 2)


def test_what_a_class_cannot_do_is_refused() -> None:
    """A config for which no plan is right is refused with the reason, not run."""
    case = cases.CASES["MotifVideoTransformer3DModel"]
    model = cases.build("MotifVideoTransformer3DModel", {**case.config, "enable_text_cross_attention_single": True})
    with pytest.raises(PlanError, match="single blocks with text cross-attention"):
        class_plan(model)


@pytest.mark.parametrize(
    ("key", "rule", "said"),
    [
        ("pos_frequencies", Rule(Style.PARAMETER, dim=3), "expected a parameter with a dim 3 in every place"),
        ("pos_frequences", Rule(Style.PARAMETER, dim=1), "expected a parameter with a dim 1 in every place"),
        ("pos_frequencies", Rule(Style.PARAMETER, (3, 2), 1), "dim 1 is 4, blocks [3, 2] do not divide it"),
    ],
)
def test_a_parameter_rule_that_does_not_fit_is_an_error(key: str, rule: Rule, said: str) -> None:
    """A dim that the parameter has not, a parameter that the model has not, blocks that do not divide."""
    model = cases.build("MochiTransformer3DModel")
    plan = {name: each for name, each in class_plan(model).items() if name != "pos_frequencies"}
    with pytest.raises(PlanError) as caught:
        resolve(model, {**plan, key: rule}, 2)
    assert any(issue.startswith(f"plan key {key!r}: {said}") for issue in caught.value.issues)


def test_an_attention_that_nobody_checked_is_refused() -> None:
    """A plan file for a class of the catalogue that reaches an attention its entry does not name is refused."""
    model = cases.build("ConsisIDTransformer3DModel")
    more = {
        f"perceiver_cross_attention.{i}.{layer}": Rule(style)
        for i in range(len(model.perceiver_cross_attention))
        for layer, style in (("to_q", Style.COLWISE), ("to_kv", Style.COLWISE), ("to_out", Style.ROWWISE))
    }
    with pytest.raises(PlanError, match=r"perceiver_cross_attention.0.heads is a head count, and whether"):
        resolve(model, {**class_plan(model), **more}, 2)


def test_another_diffusers_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of the catalogue under a version that it was not checked with: a warning that says how to check."""
    monkeypatch.setattr(diffusers, "__version__", "0.99.0")
    with pytest.warns(
        shardconv.ShardconvWarning, match=r"checked with diffusers 0.42.1, this is 0.99.0; run: shardconv"
    ):
        shardconv.convert(source("PixArtTransformer2DModel"), tmp_path / "out", tp=2)


@pytest.mark.slow
def test_lean_is_recorded_and_excludes_a_plan(tmp_path: Path) -> None:
    """The set states the full plan, what `lean` added included, and loads; with a plan given, lean is a usage error."""
    import catalogue_ranks

    name = "FluxTransformer2DModel"
    manifest = shardconv.convert(source(name), tmp_path / "out", tp=2, lean=True)
    assert manifest.plan.keys() - class_plan(built(name)).keys() == ENTRIES[name].lean.keys()
    assert {tensor.style for tensor in manifest.tensors if tensor.name.endswith("norm.linear.weight")} == {
        "rowwise_split_input"
    }
    assert max(ranks.values(catalogue_ranks.load_and_compare, tmp_path / "out", expected(name))) <= TOLERANCE
    with pytest.raises(shardconv.UsageError, match="adds to the class's own plan"):
        shardconv.convert(source(name), tmp_path / "other", tp=2, lean=True, plan="auto-rows")


def test_lean_leaves_out_what_the_degree_does_not_divide() -> None:
    """A degree that the plan itself allows is never forbidden by what `lean` adds."""
    model = cases.build("ConsisIDTransformer3DModel")  # time_embed_dim is 12
    plain = class_plan(model)
    assert class_plan(model, 4).keys() > plain.keys()
    assert class_plan(model, 8).keys() == plain.keys()


def test_auto_rows_is_a_plan_for_any_class(tmp_path: Path) -> None:
    """A class that nobody planned is converted under `auto-rows`, with one key for the same layer of all blocks; it is
    never chosen without being asked for."""
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=3, sample_size=8
    )
    model.save_pretrained(tmp_path / "in")
    manifest = shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2, plan="auto-rows")
    assert set(manifest.plan.values()) == {Rule(Style.ROWWISE_SPLIT_INPUT)}
    assert "transformer_blocks.*.attn1.to_q" in manifest.plan
    cut = {tensor.name for tensor in manifest.tensors if tensor.cut}
    linears = {f"{name}.weight" for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert cut == linears
    with pytest.raises(PlanError, match="is not in the catalogue"):
        shardconv.convert(tmp_path / "in", tmp_path / "other", tp=2)
