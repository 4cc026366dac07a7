"""`load_model`: locate, validate, transfer, attach, parallelize."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardconv import models
from shardconv.dtypes import torch_dtype
from shardconv.errors import LoadError, SetError, UsageError
from shardconv.header import REAL_FLOATS
from shardconv.manifest import Manifest
from shardconv.pagecache import is_cached

from .locate import find_set
from .parallel import apply, check_layers
from .ranks import Ranks, place_of, ranks_of, together
from .readahead import read_ahead
from .transfer import map_file, read_file
from .validate import OpenSet, check_digests, check_model, open_set


def load_model(
    path: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    group: Any = None,
    verify: bool = False,
) -> nn.Module:
    """Load this rank's part of a converted model.

    Args:
        path: what `shardconv convert` wrote: a component folder, an output folder with `subfolder`, or one set (`tp4`).
        subfolder: the component inside `path`.
        device: where to; None is this rank's accelerator (LOCAL_RANK), else the CPU.
        dtype: cast real floating point to it, the class's `_keep_in_fp32_modules` excepted; None keeps what is stored.
        group: a process group or a one-dimensional device mesh whose ranks share the model; None for all processes.
            A set of tp degree 1 needs none.
        verify: also hash every byte against the manifest before it is used.

    Returns:
        The diffusers model, an instance of its own class in eval mode, for inference (no gradients). On the CPU its
        parameters are views into the mapped files.

    Raises:
        LoadError: on every rank, with the reasons of the ranks that could not load.
        SetError, CheckpointError, UsageError: the same when one process runs alone.
    """
    ranks = ranks_of(group)
    model: nn.Module | None = None

    def load() -> str:
        nonlocal model
        _check_dtype(dtype)
        model, conversion_id = _load_rank(path, subfolder, place_of(device), dtype, ranks, verify)
        return f"{conversion_id} as {dtype or 'stored'}"

    ids = together(ranks, load)
    if len(set(ids)) > 1:
        raise LoadError(
            f"{path}: the ranks load different things ({', '.join(map(str, ids))}); give every node the same set and "
            "every rank the same dtype"
        )
    assert model is not None
    return model


def _check_dtype(dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(
            f"dtype: expected a floating point torch.dtype, found {dtype}; leave it out to keep what is stored"
        )


def _load_rank(
    path: str | os.PathLike[str],
    subfolder: str | None,
    device: torch.device,
    dtype: torch.dtype | None,
    ranks: Ranks,
    verify: bool,
) -> tuple[nn.Module, str]:
    """This rank's model and the id of its conversion; no other rank is waited for."""
    opened = open_set(find_set(path, subfolder, ranks.size), ranks.rank, ranks.size)
    manifest = opened.manifest
    with _reading(opened, device) as take:
        cls = models.model_class(manifest.model_class, opened.config.get("_diffusers_version"))
        model = models.skeleton(cls, opened.config, _building_dtype(manifest, dtype))
        resolution = check_model(opened, model)
        check_layers(model, resolution.modules)
        if verify:
            check_digests(opened, ranks.rank)
        tensors = take()
    if dtype is not None:
        tensors = _cast(tensors, dtype, models.keep_in_fp32(cls))
    _attach(model, tensors, device)
    if ranks.size > 1:
        apply(model, resolution, ranks)
    model.register_to_config(_name_or_path=os.fspath(path))
    return model, manifest.conversion_id


@contextmanager
def _reading(opened: OpenSet, device: torch.device) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
    """Bytes move while the model's skeleton is built; the value gives the tensors of this rank's files by name."""
    if device.type == "cpu":
        cold = [file.path for file in opened.files if not is_cached(file.path)]
        if cold:
            read_ahead(cold)
        yield lambda: {k: v for file in opened.files for k, v in map_file(file.path, file.header).items()}
        return
    with ThreadPoolExecutor(1, "loader-transfer") as executor:
        pending = [executor.submit(read_file, file.path, file.header, device) for file in opened.files]
        try:
            yield lambda: {k: v for future in pending for k, v in future.result().items()}
        finally:
            for future in pending:
                future.cancel()


def _building_dtype(manifest: Manifest, dtype: torch.dtype | None) -> torch.dtype:
    """The default dtype to build the skeleton under, which decides the dtype of its buffers: as diffusers does, the
    one asked for; else the stored one that most weights have."""
    if dtype is None:
        elements: dict[str, int] = {}
        for tensor in manifest.tensors:
            if tensor.dtype in REAL_FLOATS:
                elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.slice_nbytes(1)
        dtype = torch_dtype(max(elements, key=lambda name: elements[name])) if elements else torch.float32
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.float32


def _cast(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, fp32_modules: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    real = {torch_dtype(name) for name in REAL_FLOATS}
    return {
        name: tensor.to(torch.float32 if models.kept_in_fp32(name, fp32_modules) else dtype)
        if tensor.dtype in real
        else tensor
        for name, tensor in tensors.items()
    }


def _attach(model: nn.Module, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give every parameter and persistent buffer its tensor, tied ones one object; other buffers go to `device`."""
    ready: dict[int, nn.Parameter] = {}
    places = list(model.named_parameters(remove_duplicate=False))
    for name, skeleton in places:
        if name in tensors and id(skeleton) not in ready:
            ready[id(skeleton)] = nn.Parameter(tensors[name], requires_grad=False)
    missing = [name for name, skeleton in places if id(skeleton) not in ready]
    if missing:
        raise SetError(f"{missing[0]}: has no tensor in the set ({len(missing)} such); convert again")
    for name, skeleton in places:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = ready[id(skeleton)]
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = tensors[name] if name in tensors else buffer.to(device)
