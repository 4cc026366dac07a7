"""Whole pipelines: saved, converted, loaded on two ranks, run; the image is that of the unsharded pipeline."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import ranks
import small_pipelines
import torch
import torch.distributed as dist
from PIL import Image

import loader
import shardconv

TOLERANCE = 1e-5  # of an output between 0 and 1; measured: 8.4e-07
LEVELS = 1  # of 255, by which a value of the written image may differ: the two sides of a rounding
ROUNDED = 12  # values of 12,288 that may differ at all; measured: 1
BUILDERS: dict[str, Callable[[], Any]] = {
    "flux": small_pipelines.build_flux_pipeline,
    "flux2": small_pipelines.build_flux2_pipeline,
    "qwenimage": small_pipelines.build_qwenimage_pipeline,
}
KINDS = tuple(BUILDERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """(source, converted for two ranks) of a small pipeline."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            base = tmp_path_factory.mktemp(kind)
            made[kind] = base / "source", base / "out"
            BUILDERS[kind]().save_pretrained(made[kind][0])
            shardconv.convert(*made[kind], tp=2)
        return made[kind]

    return of


def run(pipeline: Any, kind: str) -> np.ndarray:
    """Two images, values between 0 and 1."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(5)
    return pipeline(**small_pipelines.call_kwargs(kind), generator=generator, output_type="np").images


def load_and_run(out: Path, kind: str, png: Path) -> tuple[np.ndarray, str]:
    """The images, and the name of the transformer's class; rank 0 writes the first image."""
    pipeline = loader.load_pipeline(out, device="cpu")
    images = run(pipeline, kind)
    if dist.get_rank() == 0:
        pipeline.image_processor.numpy_to_pil(images)[0].save(png)
    return images, f"{type(pipeline.transformer).__module__}.{type(pipeline.transformer).__qualname__}"


def load_without_text_encoders(out: Path, kind: str) -> tuple[list[str], np.ndarray]:
    """Names of the components that are None, and the images."""
    names = [name for name in pipeline_parts(out) if name.startswith(("text_encoder", "tokenizer"))]
    pipeline = loader.load_pipeline(out, device="cpu", **dict.fromkeys(names))
    return sorted(name for name, part in pipeline.components.items() if part is None), run(pipeline, kind)


def pipeline_parts(out: Path) -> dict[str, Any]:
    return diffusers.DiffusionPipeline.load_config(out)


def dtypes_of_parts(out: Path) -> dict[str, set[torch.dtype]]:
    return dtypes_of(loader.load_pipeline(out, device="cpu", dtype=torch.bfloat16))


def dtypes_of(pipeline: Any) -> dict[str, set[torch.dtype]]:
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    return {name: {parameter.dtype for parameter in part.parameters()} for name, part in modules.items()}


def refusals_of(out: Path, target: Path) -> dict[str, str]:
    """Method of the pipeline -> its refusal."""
    pipeline = loader.load_pipeline(out, device="cpu")
    calls: dict[str, Callable[[], Any]] = {
        "enable_model_cpu_offload": lambda: pipeline.enable_model_cpu_offload(device="cpu"),
        "enable_sequential_cpu_offload": lambda: pipeline.enable_sequential_cpu_offload(device="cpu"),
        "save_pretrained": lambda: pipeline.save_pretrained(target),
    }
    refusals = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, NotImplementedError) as error:
            refusals[name] = str(error)
    return refusals


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_image_is_that_of_the_unsharded_pipeline(kind, folders, tmp_path):
    """Same seed, same embeddings: every rank gets the unsharded image, and the PNG that rank 0 wrote opens as it."""
    source, out = folders(kind)
    expected = run(type(BUILDERS[kind]()).from_pretrained(source), kind)
    assert expected.std() > 0.05  # an image, not a plain colour
    for images, _ in ranks.values(load_and_run, out, kind, tmp_path / "image.png"):
        assert images.shape == expected.shape == (2, small_pipelines.SIZE, small_pipelines.SIZE, 3)
        assert np.abs(images - expected).max() <= TOLERANCE
    with Image.open(io.BytesIO((tmp_path / "image.png").read_bytes())) as png:
        assert png.format == "PNG"
        written = np.asarray(png).astype(int)
    levels = np.abs(written - np.round(expected[0] * 255))
    assert levels.max() <= LEVELS
    assert (levels > 0).sum() <= ROUNDED


@pytest.mark.slow
def test_the_transformer_is_of_the_very_diffusers_class(folders, tmp_path):
    """What the pipeline holds is an instance of diffusers' own class, so that its checks by class go on working."""
    _, out = folders("flux")
    cls = diffusers.FluxTransformer2DModel
    found = ranks.values(load_and_run, out, "flux", tmp_path / "image.png")
    assert [name for _, name in found] == [f"{cls.__module__}.{cls.__qualname__}"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_components_can_be_left_out(kind, folders, tmp_path):
    """`text_encoder=None` and the like reach diffusers: the component is not loaded, and embeddings do instead."""
    _, out = folders(kind)
    whole = ranks.values(load_and_run, out, kind, tmp_path / "image.png")
    for (absent, images), (expected, _) in zip(ranks.values(load_without_text_encoders, out, kind), whole, strict=True):
        assert {"text_encoder", "tokenizer"} <= set(absent)
        assert np.array_equal(images, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_dtype_reaches_every_component(kind, folders):
    """`dtype=torch.bfloat16` casts the sharded component and those that diffusers loads, as it does by itself: an older
    transformers keeps a part of T5 in float32."""
    source, out = folders(kind)
    expected = dtypes_of(diffusers.DiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16))
    assert {"transformer", "vae", "text_encoder"} <= set(expected)
    for found in ranks.values(dtypes_of_parts, out):
        assert found == expected
        assert found["transformer"] == {torch.bfloat16}


@pytest.mark.slow
def test_f9_f13_a_sharded_pipeline_refuses_offloading_and_saving(folders, tmp_path):
    """Offloading and saving a sharded pipeline fail by diffusers' own checks; saving says how to get whole weights."""
    _, out = folders("flux")
    for refusals in ranks.values(refusals_of, out, tmp_path / "saved"):
        assert set(refusals) == {"enable_model_cpu_offload", "enable_sequential_cpu_offload", "save_pretrained"}
        assert all("tensor parallelism" in text for text in refusals.values())
        assert "shardconv merge" in refusals["save_pretrained"]


def load_each(outs: list[Path]) -> str:
    """Each rank loads the folder of its node."""
    loader.load_pipeline(outs[dist.get_rank()], device="cpu")
    return "loaded"


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["model_index.json", "vae/config.json", "transformer/tp2/replicated.safetensors"])
def test_f3_what_one_node_lacks_ends_all_ranks(absent, folders, tmp_path):
    """A file missing on the node of rank 1, of whatever component, is rank 1's reason on both ranks, at once."""
    _, out = folders("flux")
    other = Path(shutil.copytree(out, tmp_path / "node1"))
    (other / absent).unlink()
    outcomes = ranks.run(load_each, [out, other], timeout=20)
    outcome = ranks.same(outcomes)
    assert outcome.error == "LoadError"
    assert outcome.text.startswith("rank 1: ")
    assert Path(absent).name in outcome.text or "AutoencoderKL" in outcome.text
    assert all(each.seconds < 10 for each in outcomes)


@pytest.mark.parametrize("degree", [1, 2])
def test_one_process_runs_the_pipeline_bit_equal(degree, folders, tmp_path):
    """A pipeline converted for one rank or for more needs no process group in one process, and gives the very image."""
    source, out = folders("flux")
    if degree == 1:
        out = tmp_path / "out"
        shardconv.convert(source, out, tp=1)
    expected = run(diffusers.FluxPipeline.from_pretrained(source), "flux")
    assert np.array_equal(run(loader.load_pipeline(out, device="cpu"), "flux"), expected)


def test_a_folder_that_is_no_pipeline_is_refused(folders, tmp_path):
    """A component folder, a pipeline without a set and a missing folder are refused with what to do instead."""
    source, out = folders("flux")
    with pytest.raises(shardconv.SetError, match=r"transformer: no model_index.json.*use load_model"):
        loader.load_pipeline(out / "transformer", device="cpu")
    with pytest.raises(shardconv.SetError, match=r"no component holds a converted set; run: shardconv convert"):
        loader.load_pipeline(source, device="cpu")
    with pytest.raises(shardconv.SetError, match=r"nowhere: no such folder"):
        loader.load_pipeline(tmp_path / "nowhere", device="cpu")
