"""Pipelines whose text encoders are sharded, called with a string: converted, loaded on two and on four ranks, run; the
image is that of the unsharded pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import ranks
import small_pipelines
import torch
from safetensors.torch import load_file

import loader
import shardconv
from shardconv.cli.main import main
from shardconv.format.manifest import Manifest

TOLERANCE = 1e-5  # of an output between 0 and 1
PROMPTS = ["a cat", "the boat on a blue river"]
SHARDED = ("text_encoder_2", "transformer")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small FLUX.1 pipeline with CLIP and T5."""
    folder = tmp_path_factory.mktemp("encoders") / "source"
    small_pipelines.build_flux_pipeline().save_pretrained(folder)
    return folder


def images(pipeline: Any) -> np.ndarray:
    """Of two prompts, values between 0 and 1."""
    pipeline.set_progress_bar_config(disable=True)
    given = {"height": small_pipelines.SIZE, "width": small_pipelines.SIZE, "num_inference_steps": 2}
    return pipeline(
        PROMPTS, max_sequence_length=16, generator=torch.Generator().manual_seed(5), output_type="np", **given
    ).images


def of_a_rank(out: Path) -> tuple[np.ndarray, str, torch.Tensor, int]:
    """The images, the encoder's class, what its vocabulary gives for some ids, and its bytes here."""
    pipeline = loader.load_pipeline(out, device="cpu")
    encoder = pipeline.text_encoder_2
    held = sum(parameter.nbytes for parameter in {id(each): each for each in encoder.parameters()}.values())
    ids = torch.arange(60).reshape(2, 30)
    with torch.no_grad():
        return images(pipeline), type(encoder).__qualname__, encoder.get_input_embeddings()(ids), held


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_a_prompt_gives_the_unsharded_image(source: Path, tmp_path: Path, tp: int) -> None:
    """From the string: tokens, sharded T5, sharded denoiser. The encoder is of its own class, its vocabulary is exact
    to the bit when it is called alone, and a rank holds its part of it."""
    shardconv.convert(source, tmp_path / "out", tp=tp, only=SHARDED)
    whole = diffusers.FluxPipeline.from_pretrained(source)
    expected, encoder = images(whole), whole.text_encoder_2
    nbytes = sum(each.nbytes for each in {id(each): each for each in encoder.parameters()}.values())
    table = encoder.get_input_embeddings().weight.detach()[torch.arange(60).reshape(2, 30)]
    for found, name, looked_up, held in ranks.values(of_a_rank, tmp_path / "out", n=tp):
        assert np.abs(found - expected).max() <= TOLERANCE
        assert name == "T5EncoderModel"
        assert torch.equal(looked_up, table)
        assert held < nbytes / tp * 1.05


@pytest.mark.slow
def test_one_process_gets_the_ordinary_encoder(source: Path, tmp_path: Path) -> None:
    """Parameters, buffers, ties, config and dtype of `load_model` are those of `from_pretrained`; `merge` gives the
    encoder's file back, under transformers' name for it."""
    shardconv.convert(source, tmp_path / "out", tp=2, only=("text_encoder_2",))
    ours: Any = loader.load_model(tmp_path / "out", subfolder="text_encoder_2", device="cpu")
    theirs = type(ours).from_pretrained(source / "text_encoder_2")
    assert {name: value.dtype for name, value in ours.state_dict().items()} == {
        name: value.dtype for name, value in theirs.state_dict().items()
    }
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())
    assert ours.shared.weight is ours.encoder.embed_tokens.weight
    mine, wanted = ours.config.to_dict(), theirs.config.to_dict()
    assert {key: mine[key] for key in wanted if key != "_name_or_path"} == {
        key: value for key, value in wanted.items() if key != "_name_or_path"
    }
    assert not ours.training
    shardconv.merge(tmp_path / "out" / "text_encoder_2", tmp_path / "merged")
    merged, stored = (
        load_file(each / "model.safetensors") for each in (tmp_path / "merged", source / "text_encoder_2")
    )
    assert set(merged) == set(stored)
    assert all(torch.equal(merged[name], stored[name]) for name in stored)


def test_small_encoders_stay_whole_unless_named(source: Path, tmp_path: Path) -> None:
    """Unasked, an encoder is sharded when a rank saves 1 GB; `--whole` leaves a component as it is."""
    shardconv.convert(source, tmp_path / "out", tp=2)
    assert not (tmp_path / "out" / "text_encoder_2" / "tp2").exists()
    assert (tmp_path / "out" / "text_encoder_2" / "model.safetensors").is_file()
    with pytest.raises(shardconv.PlanError, match="no component has a class"):
        shardconv.convert(source, tmp_path / "none", tp=2, whole=["transformer"])


def test_what_pays_is_sharded(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every encoder worth it, T5 is cut and CLIP, which has no plan, is not; a degree that it cannot take leaves
    it whole with a sentence."""
    monkeypatch.setattr("shardconv.commands.components.PAYS_NBYTES", 1000)
    shardconv.convert(source, tmp_path / "out", tp=2)
    assert Manifest.read(tmp_path / "out" / "text_encoder_2" / "tp2").library_name == "transformers"
    assert not list((tmp_path / "out" / "text_encoder").glob("tp*"))
    with pytest.warns(shardconv.ShardconvWarning, match="text_encoder_2: stays whole: .*4 heads"):
        shardconv.convert(source, tmp_path / "eight", tp=8)


def test_without_transformers_encoders_stay_whole(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever converts without it gets the denoiser sharded, and a sentence."""
    monkeypatch.setattr("shardconv.commands.components.PAYS_NBYTES", 1000)
    monkeypatch.setattr("shardconv.commands.components.find_spec", lambda name: None)
    with pytest.warns(shardconv.ShardconvWarning, match="text_encoder_2: stays whole: transformers is not installed"):
        shardconv.convert(source, tmp_path / "out", tp=2)
    assert (tmp_path / "out" / "transformer" / "tp2").is_dir()
    assert (tmp_path / "out" / "text_encoder_2" / "model.safetensors").is_file()


def test_names_that_are_no_components_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--only` and `--whole` say what there is; an encoder without a plan cannot be named."""
    argv = ["convert", "--tp", "2", str(source), str(tmp_path / "out")]
    assert main([*argv, "--only", "text_encoder_3"]) == 2
    assert "text_encoder_3: no component of" in capsys.readouterr().err
    assert main([*argv, "--only", "text_encoder"]) == 1
    assert "its class, CLIPTextModel, has no plan" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_fp16_keeps_what_transformers_keeps(source: Path, tmp_path: Path) -> None:
    """T5's `wo` stays in fp32 under fp16 and is cast under bf16, as `from_pretrained` does."""
    for dtype, kept in (("fp16", "F32"), ("bf16", "BF16")):
        shardconv.convert(source, tmp_path / dtype, tp=2, only=("text_encoder_2",), dtype=dtype)
        document = json.loads((tmp_path / dtype / "text_encoder_2" / "tp2" / "shardconv.json").read_text())
        dtypes = {tensor["name"]: tensor["dtype"] for tensor in document["tensors"]}
        assert {dtypes[name] for name in dtypes if ".wo." in name} == {kept}


@pytest.mark.slow
def test_through_the_hub_and_back(hub: Any, client: Any, source: Path, tmp_path: Path) -> None:
    """A repo's encoder is converted with one weight file on disk at a time; what is pushed is loaded from the repo."""
    hub.add_folder("org/flux", source)
    shardconv.convert("org/flux", tmp_path / "planned", tp=2, only=SHARDED, dry_run=True)
    shardconv.convert("org/flux", tmp_path / "out", tp=2, only=SHARDED, low_disk=True)
    shardconv.push(tmp_path / "out", "org/flux-tp2")
    assert not [name for name in hub.repos["org/flux-tp2"].files() if name == "text_encoder_2/model.safetensors"]
    pipeline = loader.load_pipeline("org/flux-tp2", device="cpu")
    assert np.abs(images(pipeline) - images(diffusers.FluxPipeline.from_pretrained(source))).max() <= TOLERANCE
