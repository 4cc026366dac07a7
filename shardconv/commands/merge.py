"""`shardconv merge` as a library call: from a set back to an ordinary diffusers checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engine import run as engine
from ..engine.pool import write_all
from ..engine.records import RoutePlan
from ..engine.slices import check_digests, slices_of
from ..errors import OutputError, SetError, every
from ..format.config import config_digest, read_config
from ..format.dtypes import nbytes_of
from ..format.header import TensorEntry, encode_header
from ..format.layout import StoredTensor
from ..format.manifest import Manifest
from ..format.names import CONFIG_NAME, MANIFEST_NAME, MODEL_INDEX, WEIGHTS_STEM
from ..format.pipeline import rest_of_pipeline
from ..format.sets import SetFile, any_set, component_of, components_in, open_files
from ..libraries.choose import library_named
from ..system.linux import remove_folders
from ..system.progress import Progress
from ..target.checks import check_space, copied_nbytes
from ..target.folder import PartialFolder
from ..target.links import link_files

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


@dataclass(frozen=True, slots=True)
class _Job:
    """One component, ready to go."""

    component: str  # "" when PATH is the component itself
    manifest: Manifest
    config_bytes: bytes
    weights: Sequence[_WeightFile]
    plan: RoutePlan

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.weights)


def merge(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    new_progress: Callable[[str, int], Progress] = lambda what, total: lambda nbytes: None,
) -> list[str]:
    """Write the model of the set at `path` to `out` as diffusers saves it.

    `path` is a component folder or a `tpN`; of an output folder every sharded component is merged, and the rest of the
    pipeline hard-linked. Tensors are bit-identical to the source's, or to its cast when the set was cast; every slice's
    digest is compared on the way. `out` must not exist or be empty. Returns the names of the files, relative to `out`.

    Raises:
        SetError: a set is incomplete, damaged or of mixed origin.
        OutputError: `out` is not empty, cannot be written or lacks room. Nothing is left behind.
    """
    path, out = Path(path), Path(out)
    if out.is_symlink():
        out = out.resolve()
    _check_place(path, out)
    jobs = every(lambda name: _prepare(path / name, name, max_shard_nbytes), components_in(path), SetError)
    is_pipeline = jobs[0].component != "" and (path / MODEL_INDEX).is_file()
    rest = rest_of_pipeline(path, [job.component for job in jobs]) if is_pipeline else []
    existed = out.exists()
    if existed and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out}: expected a new or empty folder, found something in it; name another OUT")
    issues = check_space(out, sum(job.nbytes for job in jobs), copied_nbytes(path, out, rest))
    if issues:
        raise OutputError(*issues)
    written: list[str] = []
    try:
        for job in jobs:
            written += _execute(job, out / job.component, new_progress)
        link_files(path, out, rest)
    except BaseException:
        _undo(out, [*written, *rest], existed)
        raise
    return [*written, *rest]


def _check_place(path: Path, out: Path) -> None:
    """Raises `OutputError` when OUT is what is read, or lies in it."""
    home = path.absolute().parent if (path / MANIFEST_NAME).is_file() else path
    place = out.resolve()
    for real in {home.resolve(), path.resolve()}:
        if real == place or real in place.parents:
            raise OutputError(f"{out}: lies inside {real}, which is read and stays as it is; name another OUT")


def _prepare(component: Path, name: str, limit: int) -> _Job:
    folder = any_set(component)
    manifest = Manifest.read(folder)
    config, config_bytes = read_config(component_of(folder))
    if config_digest(config) != manifest.config_digest:
        raise SetError(f"{folder.parent / CONFIG_NAME}: not the config that was converted; put the source's back")
    files = open_files(folder, manifest, range(manifest.tp_degree))
    weights = _weight_files(manifest, limit)
    return _Job(name, manifest, config_bytes, weights, _route_plan(manifest, files, weights))


def _execute(job: _Job, out: Path, new_progress: Callable[[str, int], Progress]) -> list[str]:
    """Write one component; the names of its files, relative to the whole OUT."""
    progress = new_progress("merge", job.plan.read_nbytes)
    with PartialFolder(out.absolute()) as partial:
        outputs = partial.create({file.name: file.nbytes for file in job.weights})
        check_digests(job.manifest, engine.reroute(job.plan, outputs, progress))
        for file, fd in zip(job.weights, outputs, strict=True):
            write_all(fd, memoryview(file.header), 0)
        last = {CONFIG_NAME: job.config_bytes}
        if len(job.weights) > 1:
            last[f"{_stem(job.manifest)}.safetensors.index.json"] = _index(job.manifest.tensors, job.weights)
        if out.exists():
            out.rmdir()
        partial.publish(last)
    return [str(Path(job.component, name)) for name in [*last, *(file.name for file in job.weights)]]


def _undo(out: Path, names: Sequence[str], existed: bool) -> None:
    """Take away the files `names` of `out`, which was new or empty, and the folders they were in."""
    for name in names:
        (out / name).unlink(missing_ok=True)
    folders = {parent for name in names for parent in Path(name).parents} - {Path(".")}
    deepest_first = sorted(folders, key=lambda folder: -len(folder.parts))
    remove_folders([*(out / folder for folder in deepest_first), *([] if existed else [out])])


def _stem(manifest: Manifest) -> str:
    """What the names of the weight files begin with, by the model's library."""
    library = library_named(manifest.library_name)
    return library.weight_stem if library else WEIGHTS_STEM


def _weight_files(manifest: Manifest, limit: int) -> list[_WeightFile]:
    """Tensors in source order, in files of at most `limit` bytes (a larger tensor has a file of its own)."""
    groups: list[list[TensorEntry]] = [[]]
    for tensor in manifest.tensors:
        nbytes = nbytes_of(tensor.dtype, tensor.shape)
        start = groups[-1][-1].end if groups[-1] else 0
        if groups[-1] and start + nbytes > limit:
            groups.append([])
            start = 0
        groups[-1].append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, start, nbytes))
    total = len(groups)
    return [
        _WeightFile(
            f"{_stem(manifest)}{f'-{position:05d}-of-{total:05d}' if total > 1 else ''}.safetensors",
            tuple(group),
            encode_header(group, {"format": "pt"}),
        )
        for position, group in enumerate(groups, 1)
    ]


def _route_plan(manifest: Manifest, files: Sequence[SetFile], weights: Sequence[_WeightFile]) -> RoutePlan:
    starts = {
        entry.name: [(index, len(file.header) + entry.start)]
        for index, file in enumerate(weights)
        for entry in file.entries
    }
    return RoutePlan(manifest.tensors, slices_of(manifest, files), starts)


def _index(tensors: Sequence[StoredTensor], weights: Sequence[_WeightFile]) -> bytes:
    total = sum(nbytes_of(tensor.dtype, tensor.shape) for tensor in tensors)
    weight_map = {entry.name: file.name for file in weights for entry in file.entries}
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
