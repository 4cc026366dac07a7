"""`shardconv merge` as a library call: from a set back to an ordinary diffusers checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import engine
from .checkpoint import CONFIG_NAME, WEIGHTS_STEM, config_digest, read_config
from .destination import PartialFolder, check_space
from .errors import OutputError, SetError, ShardconvError
from .header import TensorEntry, encode_header, nbytes_of
from .layout import StoredTensor
from .manifest import Manifest
from .sets import SetFile, any_set, open_files
from .slices import check_digests, slices_of

MAX_SHARD_NBYTES = 10 * 1000**3  # the default of diffusers' save_pretrained ("10GB")


@dataclass(frozen=True, slots=True)
class _WeightFile:
    """One file of the checkpoint to be written."""

    name: str
    entries: tuple[TensorEntry, ...]
    header: bytes

    @property
    def nbytes(self) -> int:
        return len(self.header) + (self.entries[-1].end if self.entries else 0)


def merge(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    new_progress: Callable[[str, int], engine.Progress] = lambda what, total: lambda nbytes: None,
) -> list[str]:
    """Write the model of the set at `path` (a component folder or a `tpN`) to `out` as diffusers saves it.

    Tensors are bit-identical to the source's, or to its cast when the set was cast; every slice's digest is compared on
    the way. `out` must not exist or be empty. Returns the names of the files written.

    Raises:
        SetError: the set is incomplete, damaged or of mixed origin.
        OutputError: `out` is not empty, cannot be written or lacks room. Nothing is left behind.
    """
    folder, out = any_set(Path(path)), Path(out)
    manifest = Manifest.read(folder)
    config, config_bytes = read_config(folder.absolute().parent)
    if config_digest(config) != manifest.config_digest:
        raise SetError(f"{folder.parent / CONFIG_NAME}: not the config that was converted; put the source's back")
    files = open_files(folder, manifest, range(manifest.tp_degree))
    weights = _weight_files(manifest.tensors, max_shard_nbytes)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out}: expected a new or empty folder, found something in it; name another OUT")
    issues = check_space(out, sum(file.nbytes for file in weights))
    if issues:
        raise OutputError(*issues)
    plan = _route_plan(manifest, files, weights)
    progress = new_progress("merge", plan.read_nbytes)
    try:
        with PartialFolder(out.absolute()) as partial:
            outputs = partial.create({file.name: file.nbytes for file in weights})
            check_digests(manifest, engine.reroute(plan, outputs, progress))
            for file, fd in zip(weights, outputs, strict=True):
                engine.write_all(fd, memoryview(file.header), 0)
            last = {CONFIG_NAME: config_bytes}
            if len(weights) > 1:
                last[f"{WEIGHTS_STEM}.safetensors.index.json"] = _index(manifest.tensors, weights)
            if out.exists():
                out.rmdir()
            partial.publish(last)
    except OSError as error:
        if isinstance(error, ShardconvError):
            raise
        raise OutputError(f"{out}: {error.strerror}; nothing was left behind") from error
    return [*last, *(file.name for file in weights)]


def _weight_files(tensors: Sequence[StoredTensor], limit: int) -> list[_WeightFile]:
    """Tensors in source order, in files of at most `limit` bytes (a larger tensor has a file of its own)."""
    groups: list[list[TensorEntry]] = [[]]
    for tensor in tensors:
        nbytes = nbytes_of(tensor.dtype, tensor.shape)
        start = groups[-1][-1].end if groups[-1] else 0
        if groups[-1] and start + nbytes > limit:
            groups.append([])
            start = 0
        groups[-1].append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, start, nbytes))
    total = len(groups)
    return [
        _WeightFile(
            f"{WEIGHTS_STEM}{f'-{position:05d}-of-{total:05d}' if total > 1 else ''}.safetensors",
            tuple(group),
            encode_header(group, {"format": "pt"}),
        )
        for position, group in enumerate(groups, 1)
    ]


def _route_plan(manifest: Manifest, files: Sequence[SetFile], weights: Sequence[_WeightFile]) -> engine.RoutePlan:
    starts = {
        entry.name: [(index, len(file.header) + entry.start)]
        for index, file in enumerate(weights)
        for entry in file.entries
    }
    return engine.RoutePlan(manifest.tensors, slices_of(manifest, files), starts)


def _index(tensors: Sequence[StoredTensor], weights: Sequence[_WeightFile]) -> bytes:
    total = sum(nbytes_of(tensor.dtype, tensor.shape) for tensor in tensors)
    weight_map = {entry.name: file.name for file in weights for entry in file.entries}
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
