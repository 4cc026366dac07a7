"""Pipelines that ask more of a sharded model: two denoisers, as in Wan 2.2, and a cache sized by the head count."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch
from diffusers import AnyFlowFARPipeline, FlowMapEulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler, WanPipeline

import loader
import shardconv
from shardconv.plans.catalogue import cases

NAME = "WanTransformer3DModel"
CONFIG = {
    key: value for key, value in cases.CASES[NAME].config.items() if key not in ("image_dim", "added_kv_proj_dim")
}
ABSENT = {"tokenizer": None, "text_encoder": None, "vae": None}  # the prompt is given as embeddings
TOLERANCE = 1e-4  # of the largest latent, after 4 steps; measured: 7e-07


def save_pipeline(folder: Path) -> None:
    """Two transformers with different weights, the second one for timesteps below the middle."""
    high, low = cases.build(NAME, CONFIG, seed=3), cases.build(NAME, CONFIG, seed=4)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    WanPipeline(scheduler=scheduler, transformer=high, transformer_2=low, boundary_ratio=0.5, **ABSENT).save_pretrained(
        folder
    )


def run(pipeline: WanPipeline) -> torch.Tensor:
    """Latents `[1, 4, 2, 8, 8]` after 4 steps with guidance."""
    draw = cases.Draw(7)
    pipeline.set_progress_bar_config(disable=True)
    prompt, negative = draw.normal(1, 6, CONFIG["text_dim"]), draw.normal(1, 6, CONFIG["text_dim"])
    result = pipeline(
        prompt_embeds=prompt, negative_prompt_embeds=negative, height=64, width=64, num_frames=5, num_inference_steps=4,
        guidance_scale=4.0, guidance_scale_2=3.0, latents=draw.normal(1, 4, 2, 8, 8), output_type="latent",
    )  # fmt: skip
    latents: torch.Tensor = result.frames
    return latents


def load_and_run(out: Path) -> tuple[torch.Tensor, list[int]]:
    """The latents, and how often each denoiser ran."""
    pipeline = loader.load_pipeline(out, device="cpu", **ABSENT)
    calls = [0, 0]
    for position, model in enumerate((pipeline.transformer, pipeline.transformer_2)):
        model.register_forward_hook(lambda *args, position=position: calls.__setitem__(position, calls[position] + 1))
    return run(pipeline), calls


@pytest.mark.slow
def test_both_denoisers_are_sharded_and_run(tmp_path: Path) -> None:
    """One `convert` makes a set of each denoiser; on two ranks the latents are those of the unsharded pipeline."""
    save_pipeline(tmp_path / "in")
    shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert (tmp_path / "out/transformer/tp2/shardconv.json").is_file()
    assert (tmp_path / "out/transformer_2/tp2/shardconv.json").is_file()
    expected = run(WanPipeline.from_pretrained(tmp_path / "in", **ABSENT))
    for found, calls in ranks.values(load_and_run, tmp_path / "out"):
        assert calls == [4, 4]  # 2 steps each, with and without the prompt
        assert float((found - expected).abs().max() / expected.abs().max()) <= TOLERANCE


# --- a key and value cache that the pipeline makes

FAR = "AnyFlowFARTransformer3DModel"


def run_far(pipeline: AnyFlowFARPipeline) -> torch.Tensor:
    """Latents of three chunks of one frame, each seeing the ones before it through the cache."""
    draw = cases.Draw(8)
    pipeline.set_progress_bar_config(disable=True)
    result = pipeline(
        prompt_embeds=draw.normal(1, 6, CONFIG["text_dim"]), height=64, width=64, num_frames=9, num_inference_steps=2,
        latents=draw.normal(1, 4, 3, 8, 8), chunk_partition=[1, 1, 1], output_type="latent",
    )  # fmt: skip
    latents: torch.Tensor = result.frames
    return latents


def load_and_run_far(out: Path) -> torch.Tensor:
    return run_far(loader.load_pipeline(out, device="cpu", **ABSENT))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_cache_sized_by_the_head_count_fits(tmp_path: Path) -> None:
    """AnyFlow's pipeline sizes its cache by the config's head count, which is the local one on a rank."""
    scheduler = FlowMapEulerDiscreteScheduler()
    AnyFlowFARPipeline(scheduler=scheduler, transformer=cases.build(FAR), **ABSENT).save_pretrained(tmp_path / "in")
    shardconv.convert(tmp_path / "in", tmp_path / "out", tp=2)
    expected = run_far(AnyFlowFARPipeline.from_pretrained(tmp_path / "in", **ABSENT))
    for found in ranks.values(load_and_run_far, tmp_path / "out"):
        assert float((found - expected).abs().max() / expected.abs().max()) <= TOLERANCE
