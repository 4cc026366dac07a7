"""What people build around a denoiser of a pipeline, around one that is sharded: each use gives what the unsharded one
gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import ranks
import small_pipelines
import torch

import loader
import shardconv
from shardconv.plans.catalogue import small_models

TOLERANCE = 1e-5  # of an output between 0 and 1
COARSE = 0.03  # where layers are stored in bfloat16, of whose steps there are 256 between 0.5 and 1
USES = ("controlnet", "from_pipe", "image to image", "first block cache", "layerwise casting")


def images(pipeline: Any, **more: Any) -> np.ndarray:
    """Two images of 64 x 64, values between 0 and 1."""
    pipeline.set_progress_bar_config(disable=True)
    given = small_pipelines.call_kwargs("flux") | {"output_type": "np"} | more
    return pipeline(**given, generator=torch.Generator().manual_seed(5)).images


def every_use(pipeline: Any) -> dict[str, np.ndarray]:
    """Name of a use -> the images that come of it, all around the one transformer of `pipeline`."""
    size = small_pipelines.SIZE
    picture = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(3))
    controlnet = diffusers.FluxControlNetModel.from_config(pipeline.transformer.config, num_layers=1)
    small_models.randomize(controlnet, 21)
    controlled = diffusers.FluxControlNetPipeline(**pipeline.components, controlnet=controlnet.eval())
    to_image = diffusers.FluxImg2ImgPipeline.from_pipe(pipeline, torch_dtype=torch.float32)
    assert to_image.transformer is pipeline.transformer
    found = {
        "controlnet": images(controlled, control_image=picture, controlnet_conditioning_scale=0.7),
        "image to image": images(to_image, image=picture, strength=0.9),
        "from_pipe": images(diffusers.FluxPipeline.from_pipe(to_image, torch_dtype=torch.float32)),
    }
    transformer = pipeline.transformer
    transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.5))
    found["first block cache"] = images(pipeline, num_inference_steps=4)
    transformer.disable_cache()
    transformer.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    found["layerwise casting"] = images(pipeline)
    return found


def of_a_rank(out: Path) -> dict[str, np.ndarray]:
    return every_use(loader.load_pipeline(out, device="cpu"))


def dtypes_beside(out: Path) -> tuple[torch.dtype, torch.dtype]:
    """Of a component that was passed, and of the denoiser that was loaded."""
    vae = diffusers.AutoencoderKL.from_pretrained(out, subfolder="vae", torch_dtype=torch.float32)
    pipeline = loader.load_pipeline(out, device="cpu", dtype=torch.bfloat16, vae=vae)
    assert pipeline.vae is vae
    return pipeline.vae.dtype, pipeline.transformer.dtype


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small FLUX.1 pipeline, and it converted for two ranks."""
    source = tmp_path_factory.mktemp("around") / "source"
    small_pipelines.build_flux_pipeline().save_pretrained(source)
    shardconv.convert(source, source.with_name("out"), tp=2)
    return source, source.with_name("out")


@pytest.mark.slow
def test_what_is_built_around_a_sharded_denoiser_gives_the_unsharded_images(folders: tuple[Path, Path]) -> None:
    """ControlNet, image to image and `from_pipe` share one sharded transformer; caches and layerwise casting are
    switched on after loading."""
    source, out = folders
    expected = every_use(diffusers.FluxPipeline.from_pretrained(source))
    assert set(expected) == set(USES)
    plain = expected["from_pipe"]
    assert all(np.abs(expected[use] - plain).max() > 0.01 for use in ("controlnet", "image to image"))
    for found in ranks.values(of_a_rank, out):
        for use in USES:
            allowed = COARSE if use == "layerwise casting" else TOLERANCE
            assert np.abs(found[use] - expected[use]).max() <= allowed, use


@pytest.mark.slow
def test_a_component_that_is_passed_keeps_its_dtype(folders: tuple[Path, Path]) -> None:
    """A dtype for one component: load it oneself and pass it."""
    assert set(ranks.values(dtypes_beside, folders[1])) == {(torch.float32, torch.bfloat16)}
