"""`load_pipeline`: sharded components sharded, the others as diffusers loads them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shardconv.errors import LoadError, SetError, UsageError
from shardconv.format.names import MODEL_INDEX, unfinished_degree
from shardconv.format.pipeline import pipeline_components
from shardconv.format.sets import sets_in
from shardconv.libraries.base import BUILDING
from shardconv.system.crew import stoppable

from .files import fetch as remote
from .group.agreement import agree, exchange, heed, one_call
from .group.ranks import TIMEOUT_S, Ranks, place_of, ranks_of
from .layers.refusals import refuse_on_pipeline
from .load import load_model


def load_pipeline(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    group: Any = None,
    verify: bool = False,
    transfer: str | None = None,
    timeout: float = TIMEOUT_S,
    check_inputs: bool = True,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    **components: Any,
) -> Any:
    """Load a converted pipeline folder: a diffusers pipeline, ready on `device`.

    Args:
        path: the folder that `shardconv convert` wrote from a pipeline, or a Hub repo that `shardconv push` filled.
        device, dtype, group, verify, transfer, timeout, check_inputs: as in `load_model`; `dtype` goes to the other
            components too.
        revision, token, cache_dir, local_files_only, force_download: of a Hub repo, as in `load_model`.
        components: handed to `DiffusionPipeline.from_pretrained`, e.g. `text_encoder=None` or `variant="fp16"`.

    Every rank must call the pipeline with the same inputs and a generator seeded alike. The first step of the first
    call compares them and raises `LoadError` on every rank where they differ.

    Raises:
        SetError, LoadError, UsageError, HubError: as `load_model`.
    """
    for name, instead in (("torch_dtype", "dtype"), ("subfolder", "load_model")):
        if name in components:
            raise UsageError(f"{name}: not an option here; use {instead}")
    ranks = ranks_of(group, timeout)
    with one_call(ranks, "load_pipeline"):
        place = agree(ranks, lambda: place_of(device))
        if remote.is_repo(path, ranks):
            asking = remote.Asking(revision, token, cache_dir, local_files_only, force_download)
            path = remote.fetch_pipeline(os.fspath(path), components, components.get("variant"), ranks, asking)
        sharded = _agreed(exchange(ranks, lambda: " ".join(_sharded_components(Path(path), components))))
        for name in sharded:
            components[name] = load_model(
                path,
                subfolder=name,
                device=place,
                dtype=dtype,
                group=group,
                verify=verify,
                transfer=transfer,
                timeout=timeout,
                check_inputs=check_inputs,
            )
        if dtype is None and sharded:  # the others in the dtype of the sharded one, not in fp32 as diffusers would
            dtype = components[next((each for each in sharded if each.startswith("transformer")), sharded[0])].dtype
        if dtype is not None:
            components["torch_dtype"] = dtype
        assemble = partial(_assemble, path, components, place, ranks)
        return agree(ranks, lambda: stoppable(assemble, partial(heed, ranks), "loader-assemble"))


def _agreed(told: Sequence[str]) -> list[str]:
    """The sharded components to load, which must be the same on all ranks."""
    if len(set(told)) > 1:
        found = ", ".join(f"rank {rank} {names or 'none'}" for rank, names in enumerate(told))
        raise LoadError(
            f"load_pipeline: the ranks find different sharded components to load ({found}); give every node the same "
            "folder, and every rank the same components"
        )
    return told[0].split()


def _assemble(path: str | os.PathLike[str], components: dict[str, Any], place: torch.device, ranks: Ranks) -> Any:
    with BUILDING:
        return _from_pretrained(path, components, place_of(place), ranks)


def _from_pretrained(
    path: str | os.PathLike[str], components: dict[str, Any], place: torch.device, ranks: Ranks
) -> Any:
    import diffusers

    # Called on the base class, diffusers 0.42.1 takes no components that the pipeline's own class calls optional, such
    # as Wan's transformers.
    named = getattr(diffusers, str(json.loads(Path(path, MODEL_INDEX).read_bytes()).get("_class_name")), None)
    base = diffusers.DiffusionPipeline
    cls: Any = named if isinstance(named, type) and issubclass(named, base) else base
    with _without_sets(Path(path), components) as folder:
        pipeline = cls.from_pretrained(folder, **components).to(place)
    pipeline.register_to_config(_name_or_path=os.fspath(path))
    if ranks.size > 1:
        refuse_on_pipeline(pipeline)
    return pipeline


@contextmanager
def _without_sets(folder: Path, given: Mapping[str, Any]) -> Iterator[Path]:
    """`folder`; with a variant, links to it without the components that are `given`: diffusers then looks for a dot in
    the name of everything in a component's folder, and finds none in `tp4`."""
    if given.get("variant") is None:
        yield folder
        return
    with TemporaryDirectory(prefix="shardconv-pipeline-") as view:
        for entry in folder.iterdir():
            if entry.name not in given:
                Path(view, entry.name).symlink_to(entry.absolute())
        yield Path(view)


def _sharded_components(folder: Path, given: Mapping[str, Any]) -> list[str]:
    """Names of the components to load from a set: those that have one and are not `given`."""
    if not folder.is_dir():
        raise SetError(f"{folder}: no such folder; give the folder that shardconv convert wrote")
    if not (folder / MODEL_INDEX).is_file():
        begun = sorted(degree for name in os.listdir(folder) if (degree := unfinished_degree(name)))
        if begun:
            raise SetError(
                f"{folder}: the conversion for tp degree {begun[0]} did not finish; run shardconv convert again"
            )
        raise SetError(f"{folder}: no {MODEL_INDEX}, so not a converted pipeline; use load_model for one component")
    listed = pipeline_components(folder)
    sharded = [name for name in listed if sets_in(folder / name)]
    if not sharded and not set(given) & set(listed):
        raise SetError(f"{folder}: no component holds a converted set; run: shardconv convert --tp N SOURCE {folder}")
    return [name for name in sharded if name not in given]
