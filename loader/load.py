"""`load_model`: locate, validate, transfer, attach, parallelize."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardconv.errors import LoadError, ShardconvWarning, UsageError
from shardconv.format.dtypes import CAST_FLOATS, REAL_FLOATS, format_name, torch_dtype
from shardconv.format.header import FileHeader
from shardconv.format.manifest import Manifest
from shardconv.libraries.choose import library_of, model_class
from shardconv.libraries.skeleton import kept_in_fp32, skeleton
from shardconv.system.crew import PATIENCE_S, Crew, check_stop, stoppable
from shardconv.system.pagecache import is_cached

from .files import fetch as remote
from .files.locate import find_set
from .files.readahead import read_ahead
from .files.validate import OpenSet, check_model, checking, open_set
from .group.agreement import agree, exchange, heed, one_call
from .group.ranks import TIMEOUT_S, Ranks, place_of, ranks_of
from .inputs import compare_next_call
from .layers.attach import attach
from .parallel import apply, check_layers
from .transfer.join import join
from .transfer.mapping import map_file
from .transfer.read import read_file, read_into_memory

TRANSFERS = ("mmap", "read")

Take = Callable[[], Mapping[str, torch.Tensor]]  # waits for one file's tensors, by name


def load_model(
    path: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
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
) -> nn.Module:
    """Load this rank's part of a converted model.

    Args:
        path: what `shardconv convert` wrote: a component folder, an output folder with `subfolder`, or one set (`tp4`);
            or a Hub repo `org/name`, of which each rank fetches its own file and one rank of a node the shared ones.
            Its tp degree is the group's or a multiple of it, whose slices are then joined.
        subfolder: the component inside `path`.
        device: where to; None is this rank's accelerator (LOCAL_RANK), else the CPU.
        dtype: cast real floating point to it, the class's `_keep_in_fp32_modules` excepted; None keeps what is stored.
        group: a process group or a one-dimensional device mesh whose ranks share the model; None for all processes.
            One process that loads alone needs none, whatever the degree, and gets an ordinary model.
        verify: also hash every byte against the manifest before it is used.
        transfer: "mmap" maps the files, which must stay as they are while the model lives (a shortened one ends the
            process with SIGBUS; replacing by rename is safe). "read" reads each once, front to back, after which it
            does not matter: choose it for network disks. None is "mmap" on the CPU, else "read".
        timeout: seconds that a rank which is done waits for the slowest before all raise, naming those that have not
            answered. Downloads may take longer.
        check_inputs: have the first call compare its inputs across ranks, as `loader.check_inputs` does, at no cost
            later. Ranks with different noise would finish with a wrong image and no error.
        revision, token, cache_dir, local_files_only, force_download: of a Hub repo, as in diffusers' `from_pretrained`.

    Returns:
        The diffusers model, an instance of its own class in eval mode, for inference (no gradients).

    Raises:
        LoadError: on every rank, with the reasons of the ranks that could not load.
        SetError, CheckpointError, UsageError, HubError: the same when one process runs alone.
    """
    ranks, wishes = ranks_of(group, timeout), _Wishes(device, dtype, verify, transfer)
    with one_call(ranks, "load_model"):
        place, inside = path, subfolder
        if remote.is_repo(path, ranks):
            asking = remote.Asking(revision, token, cache_dir, local_files_only, force_download)
            place, inside = remote.fetch_set(os.fspath(path), subfolder, ranks, asking), None
        model = _load_alike(place, inside, wishes, ranks)
    if check_inputs:
        compare_next_call(model, ranks)
    library_of(type(model)).note(model, os.fspath(path), dtype)
    return model


@dataclass(frozen=True, slots=True)
class _Wishes:
    """How to load, as in `load_model`."""

    device: torch.device | str | int | None
    dtype: torch.dtype | None
    verify: bool
    transfer: str | None


def _load_alike(path: str | os.PathLike[str], subfolder: str | None, wishes: _Wishes, ranks: Ranks) -> nn.Module:
    """This rank's model, once all ranks have theirs, of the same conversion and dtype."""
    given_up = threading.Event()

    def load() -> tuple[nn.Module, str]:
        _check(wishes)
        model, conversion_id = _load_rank(path, subfolder, place_of(wishes.device), wishes, ranks, given_up.is_set)
        return model, f"{conversion_id} as {wishes.dtype or 'stored'}"

    try:
        model, about = agree(ranks, load)
        _check_same(exchange(ranks, lambda: about))
    except BaseException:
        given_up.set()
        raise
    return model


def _check_same(loaded: Collection[object]) -> None:
    if len(set(loaded)) > 1:
        raise LoadError(
            f"load_model: the ranks load different things ({', '.join(map(str, loaded))}); give every node the same "
            "set and every rank the same dtype"
        )


def _check(wishes: _Wishes) -> None:
    dtype, transfer = wishes.dtype, wishes.transfer
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(
            f"dtype: expected a floating point torch.dtype, found {dtype}; leave it out to keep what is stored"
        )
    if transfer not in (None, *TRANSFERS):
        raise UsageError(f"transfer: expected {' or '.join(map(repr, TRANSFERS))}, found {transfer!r}")


def _load_rank(
    path: str | os.PathLike[str],
    subfolder: str | None,
    device: torch.device,
    wishes: _Wishes,
    ranks: Ranks,
    given_up: Callable[[], bool] = lambda: False,
) -> tuple[nn.Module, str]:
    """This rank's model and the id of its conversion; no other rank is waited for. Pages of a mapped file may come in
    after that, until `given_up()`."""
    dtype = wishes.dtype
    opened = open_set(find_set(path, subfolder, ranks.size), ranks.rank, ranks.size)
    manifest, wanted = opened.manifest, partial(heed, ranks)
    with (
        _reading(opened, device, wishes.transfer, wanted, given_up) as (stored, loaded),
        checking(opened, stored, wanted) if wishes.verify else nullcontext(lambda: None) as check,
    ):
        cls = model_class(manifest.model_class, opened.config)
        model = skeleton(cls, opened.config, _building_dtype(manifest, dtype))
        resolution = check_model(opened, model)
        check_layers(model, resolution.modules)
        check()
        heed(ranks)
        tensors = {name: tensor for take in loaded for name, tensor in take().items()}
    del stored, loaded  # they keep what a cast replaces
    if dtype is not None:
        fp32 = library_of(cls).keep_in_fp32(cls, format_name(dtype))
        cast = partial(_cast, tensors, dtype, fp32)
        # Of mapped files it reads every page; on an accelerator it belongs on the stream of this thread.
        stoppable(cast, wanted, "loader-cast") if device.type == "cpu" else cast()
    attach(model, tensors, device)
    if ranks.size > 1:
        apply(model, resolution, ranks)
        for text in resolution.warnings:
            warnings.warn(f"{path}: {text}; convert again, unless the plan was given on purpose", ShardconvWarning, 2)
    return model, manifest.conversion_id


@contextmanager
def _reading(
    opened: OpenSet,
    device: torch.device,
    transfer: str | None,
    wanted: Callable[[], None],
    given_up: Callable[[], bool],
) -> Iterator[tuple[list[Take], list[Take]]]:
    """Bytes move while the model's skeleton is built. What gives the tensors of each of this rank's files as they stand
    there, for checking; and what gives the model's tensors together, asking `wanted` while it waits."""
    transfer = transfer or ("mmap" if device.type == "cpu" else "read")
    cold = [file.path for file in opened.files if transfer == "mmap" and not is_cached(file.path)]
    if cold:
        read_ahead(cold, given_up)
    with Crew(1, "loader-transfer", heed=wanted, patience_s=PATIENCE_S) as crew:
        single = {
            file.path: crew.submit(partial(_transfer, file.path, file.header, device, transfer))
            for file in opened.single
        }
        joined = partial(crew.submit, partial(_joined, opened, device))
        pending = [*single.values(), *([] if device.type == "cpu" else [joined()])]
        stored: list[Take] = [
            single[file.path].result if file.path in single else partial(map_file, file.path, file.header)
            for file in opened.files
        ]
        loaded: list[Take] = [partial(crew.result, future) for future in pending]
        if device.type == "cpu":  # memory that is not taken before the ranks agree to go on
            loaded.append(lambda: crew.result(joined()))
        yield stored, loaded


def _transfer(path: Path, header: FileHeader, device: torch.device, transfer: str) -> Mapping[str, torch.Tensor]:
    """The tensors of one file on `device`."""
    if transfer == "read":
        return read_into_memory(path, header) if device.type == "cpu" else read_file(path, header, device)
    mapped = map_file(path, header)
    if device.type == "cpu":
        return mapped
    moved = {}
    for name, tensor in mapped.items():
        check_stop()
        moved[name] = tensor.to(device)
    return moved


def _joined(opened: OpenSet, device: torch.device) -> Mapping[str, torch.Tensor]:
    """The tensors that several files make together; none when the set's degree is the group's."""
    cuts = {tensor.name: tensor.cut for tensor in opened.manifest.tensors}
    return join(opened.joined, opened.manifest.tp_degree, cuts, device) if opened.joined else {}


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


def _cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype, fp32_modules: tuple[str, ...]) -> None:
    """In place, one after the other, so that no two copies of all of them stand side by side."""
    real = {torch_dtype(name) for name in CAST_FLOATS}
    for name, tensor in tensors.items():
        check_stop()
        if tensor.dtype in real:
            tensors[name] = tensor.to(torch.float32 if kept_in_fp32(name, fp32_modules) else dtype)
