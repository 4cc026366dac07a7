"""`load_pipeline`: sharded components sharded, the others as diffusers loads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shardconv.conversion import pipeline_components
from shardconv.destination import sets_in
from shardconv.errors import SetError

from .load import load_model
from .ranks import default_device


def load_pipeline(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    group: Any = None,
    verify: bool = False,
    **components: Any,
) -> Any:
    """Load a converted pipeline folder: a diffusers pipeline, ready on `device`.

    Args:
        path: the folder that `shardconv convert` wrote from a pipeline.
        device, dtype, group, verify: as in `load_model`; `dtype` also goes to the other components.
        components: handed to `DiffusionPipeline.from_pretrained`, e.g. `text_encoder=None` or `variant="fp16"`.

    Every rank must call the pipeline with the same inputs and a generator seeded alike: noise that differs between
    ranks gives a wrong image without an error.

    Raises:
        SetError, LoadError: as `load_model`.
    """
    import diffusers

    folder = Path(path)
    if not (folder / "model_index.json").is_file():
        raise SetError(f"{folder}: no model_index.json, so not a converted pipeline; use load_model for one component")
    sharded = [name for name in pipeline_components(folder) if sets_in(folder / name) and name not in components]
    if not sharded and not components:
        raise SetError(f"{folder}: no component holds a converted set; run: shardconv convert --tp N SOURCE {folder}")
    place = torch.device(device) if device is not None else default_device()
    for name in sharded:
        components[name] = load_model(folder, subfolder=name, device=place, dtype=dtype, group=group, verify=verify)
    if dtype is not None:
        components["torch_dtype"] = dtype
    return diffusers.DiffusionPipeline.from_pretrained(folder, **components).to(place)
