"""A class without a plan of its own and with a stored head count: MiniMax-H3 through a plan file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
import small_sets
import torch
from diffusers import DiTTransformer2DModel, MiniMaxH3Transformer3DModel
from small_minimax import CONFIG, MINIMAX_PLAN

import loader
import shardconv
from shardconv.format.manifest import Manifest
from shardconv.format.plan import Style, parse_plan
from shardconv.plans.catalogue import small_models

TOLERANCE = 1e-5  # of the largest output; measured: 1.1e-06
HEADS = CONFIG["num_attention_heads"]
COUNTS = ("heads", "num_heads", "num_attention_heads", "n_heads", "kv_heads")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "minimax.json"
    path.write_text(json.dumps(MINIMAX_PLAN))
    return path


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """Video and audio of the unsharded model."""
    model = MiniMaxH3Transformer3DModel.from_pretrained(small_sets.source("minimax"))
    return small_sets.outputs(model, "minimax")


def load_and_run(path: Path) -> tuple[list[torch.Tensor], list[int]]:
    model = loader.load_model(path, device="cpu")
    blocks = [*model.transformer_blocks, *model.token_refiner.refiner_blocks]
    return small_sets.outputs(model, "minimax"), [block.attn.heads for block in blocks]


def parallelize_and_run(plan: Path) -> list[torch.Tensor]:
    return small_sets.outputs(loader.parallelize(small_sets.build("minimax"), plan=plan), "minimax")


def head_counts(name: str, path: Path | None) -> dict[str, int]:
    """Every head count stored in the model, as loaded from `path` or unsharded."""
    model = small_models.build(name) if path is None else loader.load_model(path, device="cpu")
    modules = dict(model.named_modules()).items()
    found = {f"{m}.{c}": v.__dict__[c] for m, v in modules for c in COUNTS if isinstance(v.__dict__.get(c), int)}
    return found | {key: value for key, value in model.config.items() if "head" in key}


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_a_plan_file_makes_minimax_run_sharded(tp, plan_file, expected, tmp_path):
    """Converted by a plan file, video and audio equal the unsharded model's; attention holds its own heads."""
    shardconv.convert(small_sets.source("minimax"), tmp_path / "out", tp=tp, plan=plan_file)
    for outputs, heads in ranks.values(load_and_run, tmp_path / "out", n=tp):
        assert small_sets.difference(outputs, expected) <= TOLERANCE
        assert heads == [HEADS // tp] * 3


@pytest.mark.slow
def test_parallelize_takes_the_same_plan_file(plan_file, expected):
    """`parallelize` with the plan file as its plan gives what the loaded set gives."""
    for outputs in ranks.values(parallelize_and_run, plan_file):
        assert small_sets.difference(outputs, expected) <= TOLERANCE


def test_the_manifest_keeps_the_plan_of_the_file(plan_file, tmp_path):
    """The loader needs no plan file: the manifest states its plan, in all three kinds of style it uses."""
    manifest = shardconv.convert(small_sets.source("minimax"), tmp_path / "out", tp=2, plan=plan_file)
    assert Manifest.read(tmp_path / "out" / "tp2") == manifest
    assert set(manifest.plan) == set(MINIMAX_PLAN)
    styles = {tensor.style for tensor in manifest.tensors if tensor.cut}
    assert styles == {Style.COLWISE, Style.ROWWISE, Style.ROWWISE_SPLIT_INPUT, Style.PACKED_COLWISE}


def test_the_catalogue_has_its_plan(tmp_path):
    """Without a plan file the catalogue's is taken, which leaves the modulation whole."""
    manifest = shardconv.convert(small_sets.source("minimax"), tmp_path / "out", tp=2)
    assert manifest.plan == {key: rule for key, rule in parse_plan(MINIMAX_PLAN, "").items() if "adaln" not in key}


def test_a_class_without_a_plan_is_refused(tmp_path):
    """A class that nobody planned is not guessed at: the error names the class and says how to give a plan."""
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=1, sample_size=8
    )
    model.save_pretrained(tmp_path / "in")
    with pytest.raises(shardconv.PlanError, match=r"DiTTransformer2DModel: has no _tp_plan .*--plan FILE"):
        shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", small_models.NAMES)
def test_head_counts_of_the_other_classes_stay_whole(name):
    """Classes that derive the head dim from the count, as QwenImage does, keep every count they store."""
    unsharded = head_counts(name, None)
    assert unsharded
    assert ranks.values(head_counts, name, small_sets.converted(name, 2)) == [unsharded] * 2
