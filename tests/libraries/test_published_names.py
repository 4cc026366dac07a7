"""Models as they were published: under class names that diffusers has renamed since, or in their makers' own layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import ranks
import small_sets
import torch
import toys
from stand_in_hub import StandInHub

import loader
import shardconv
from shardconv import CheckpointError, PlanError, ShardconvError, UsageError
from shardconv.commands import plans as listing
from shardconv.libraries.choose import model_class
from shardconv.plans.catalogue import cases
from shardconv.trial.check import check

PIXART, OLD = "PixArtTransformer2DModel", "Transformer2DModel"
# Of the config that PixArt-XL-2-1024-MS has; no class of today has these arguments.
OLD_ARGUMENTS = {"double_self_attention": False, "num_vector_embeds": None, "only_cross_attention": False,
                 "use_linear_projection": False, "_diffusers_version": "0.22.0.dev0"}  # fmt: skip


@pytest.fixture(scope="module")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder of a small PixArt, both its JSON files as they were published."""
    folder = tmp_path_factory.mktemp("pixart") / "PixArt"
    model = cases.build(PIXART)
    model.save_pretrained(folder / "transformer")
    toys.edit_json(folder / "transformer" / "config.json", _class_name=OLD, **OLD_ARGUMENTS)
    diffusers.DPMSolverMultistepScheduler().save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "PixArtAlphaPipeline",
        "scheduler": ["diffusers", "DPMSolverMultistepScheduler"],
        "transformer": ["diffusers", OLD],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def expected(pixart: Path) -> list[torch.Tensor]:
    """What the model gives that diffusers loads."""
    model = getattr(diffusers, OLD).from_pretrained(pixart / "transformer").eval()
    assert type(model).__name__ == PIXART
    return outputs(model)


def outputs(model: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return cases.outputs(model, cases.inputs(model))


def run_model(out: Path, subfolder: str) -> tuple[str, list[torch.Tensor]]:
    model = loader.load_model(out, subfolder=subfolder, device="cpu", dtype=torch.float32)
    return type(model).__name__, outputs(model)


def run_pipeline(out: Path) -> tuple[str, list[torch.Tensor]]:
    absent = {"vae": None, "text_encoder": None, "tokenizer": None}
    pipeline = loader.load_pipeline(out, device="cpu", **absent)
    return type(pipeline.transformer).__name__, outputs(pipeline.transformer)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pipeline", "subfolder", "folder"])
def test_a_renamed_class_is_converted_and_runs(pixart: Path, tmp_path: Path, way: str) -> None:
    """Pipeline, `--subfolder` and component folder: the class is the one diffusers makes of it, the output the same."""
    options: dict[str, Any] = {"subfolder": "transformer"} if way == "subfolder" else {}
    out = tmp_path / "out" / "transformer" if way == "folder" else tmp_path / "out"
    manifest = shardconv.convert(pixart / "transformer" if way == "folder" else pixart, out, tp=2, **options)
    assert manifest.model_class == OLD  # as in its config, and as in the sets that `--subfolder` has always made
    assert (tmp_path / "out" / "transformer" / "config.json").read_bytes() == (
        pixart / "transformer" / "config.json"
    ).read_bytes()
    call = (run_pipeline, tmp_path / "out") if way == "pipeline" else (run_model, tmp_path / "out", "transformer")
    for name, found in ranks.values(*call):
        assert name == PIXART
        assert small_sets.difference(found, expected(pixart)) <= 1e-5
    shardconv.verify(tmp_path / "out", source=pixart if way == "pipeline" else pixart / "transformer")
    shardconv.reshard(tmp_path / "out" / "transformer", tmp_path / "other", tp=1)
    assert type(loader.load_model(tmp_path / "other", device="cpu")).__name__ == PIXART


@pytest.mark.slow
def test_a_renamed_class_is_checked_and_its_plan_printed(pixart: Path) -> None:
    """`check` and `plans`, given the folder, speak of the class of today; given the old name, say which there are."""
    verdict = check(str(pixart / "transformer"), 2)
    assert (verdict.model_class, verdict.is_right) == (PIXART, True)
    assert listing.plan_of(str(pixart / "transformer")) == listing.plan_of(PIXART)
    said = f"^{OLD}: is DiT{OLD} or {PIXART} now, as its config says; give one of them, or a component folder$"
    for ask in (lambda: check(OLD, 2), lambda: listing.plan_of(OLD)):
        with pytest.raises(UsageError, match=said):
            ask()


@pytest.mark.parametrize(
    ("norm_type", "name"),
    [("ada_norm_single", PIXART), ("ada_norm_zero", f"DiT{OLD}"), ("layer_norm", OLD), ([], OLD), (None, OLD)],
)
def test_contract_the_class_is_the_one_that_diffusers_makes(norm_type: Any, name: str) -> None:
    """By the config's `norm_type`, as diffusers' own classes decide when they are built."""
    config = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8, "in_channels": 4,
              "norm_num_groups": 2, "norm_type": norm_type, "num_embeds_ada_norm": 10}  # fmt: skip
    assert model_class(OLD, config).__name__ == name
    if isinstance(norm_type, str):
        config |= {"patch_size": 2} if norm_type != "layer_norm" else {}
        assert type(getattr(diffusers, OLD).from_config(config)).__name__ == name


def test_what_is_not_renamed_has_no_plan(pixart: Path, tmp_path: Path) -> None:
    """A pipeline whose old class stands for a model without a plan is refused by its names."""
    source = Path(shutil.copytree(pixart, tmp_path / "source"))
    toys.edit_json(source / "transformer" / "config.json", norm_type="layer_norm")
    with pytest.raises(PlanError, match=rf"no component has a class with a _tp_plan, found .*transformer \({OLD}\)"):
        shardconv.convert(source, tmp_path / "out", tp=2)


def test_a_broken_config_is_told_as_ever(pixart: Path, tmp_path: Path) -> None:
    """Looking into a component's config for its class does not hide what is wrong with it."""
    source = Path(shutil.copytree(pixart, tmp_path / "source"))
    (source / "transformer" / "config.json").write_text("{")
    with pytest.raises(ShardconvError):
        shardconv.convert(source, tmp_path / "out", tp=2)


# --- in their makers' own layout ---

ORIGINALS: Mapping[str, tuple[dict[str, Any], str]] = {
    "wan": ({"_class_name": "WanModel", "_diffusers_version": "0.30.0", "model_type": "t2v", "dim": 5120},
            "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
    "vace": ({"_class_name": "VaceWanModel", "model_type": "vace"}, "Wan-AI/Wan2.1-VACE-14B-diffusers"),
    "animate": ({"_class_name": "WanAnimateModel", "model_type": "i2v"}, "Wan-AI/Wan2.2-Animate-14B-Diffusers"),
    "hunyuan": ({"_class_name": "HunyuanVideo_1_5_DiffusionTransformer"},
                "hunyuanvideo-community/HunyuanVideo-1.5-480p_t2v"),
}  # fmt: skip


@pytest.mark.parametrize("name", ORIGINALS)
@pytest.mark.parametrize("inside", ["", "high_noise_model"])
def test_an_original_release_is_told_which_to_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, inside: str
) -> None:
    """The folder of a release in its makers' layout, one or two models in it: say which release diffusers takes."""
    config, use = ORIGINALS[name]
    source = tmp_path / "source"
    (source / inside).mkdir(parents=True)
    (source / inside / "config.json").write_text(json.dumps(config))
    toys.write_weights(source / inside / toys.SINGLE, {"blocks.0.self_attn.q.weight": torch.ones(4, 4)})
    (source / "Wan2.1_VAE.pth").write_bytes(b"never opened")
    said = toys.refused(capsys, CheckpointError, source, tmp_path / "out", tp=2)
    assert said.startswith(f"{source / inside / 'config.json'}: of a release in its makers' own layout (")
    assert use in said
    for ask in (lambda: check(str(source), 2), lambda: listing.plan_of(str(source))):
        with pytest.raises(CheckpointError, match=use):
            ask()


def test_an_original_release_is_not_fetched_first(hub: StandInHub, client: Any, tmp_path: Path) -> None:
    """Of such a repo the config is read, and no weights."""
    config, use = ORIGINALS["wan"]
    weights = toys.write_weights(tmp_path / toys.SINGLE, {"blocks.0.self_attn.q.weight": torch.ones(4, 4)}).read_bytes()
    hub.add_repo("org/wan", {"config.json": json.dumps(config).encode(), toys.SINGLE: weights})
    with pytest.raises(CheckpointError, match=use):
        shardconv.convert("org/wan", tmp_path / "out", tp=2)
    assert set(hub.fetched("org/wan")) == {"config.json"}
