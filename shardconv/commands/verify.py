"""`shardconv verify` as a library call: a set against its manifest, byte for byte, and against its source."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ..engine import run as engine
from ..engine.records import Extent
from ..errors import SetError, ShardconvError
from ..format.config import config_digest, read_config
from ..format.header import FileHeader
from ..format.layout import StoredTensor, plan_layout, stored_tensors
from ..format.manifest import Manifest
from ..format.names import CONFIG_NAME, MANIFEST_NAME, degree_of, is_hidden, is_set_file
from ..format.sets import component_of, components_in, read_files, set_folders
from ..libraries.skeleton import kept_in_fp32
from ..source.checkpoint import Checkpoint, open_checkpoint
from ..source.locate import locate
from ..system.progress import NewProgress
from .prepare import plan_conversion


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found of one set, or of one file of it."""

    path: Path  # of the set, or of the file
    manifest: Manifest | None  # None: it cannot be read
    nbytes: int  # of tensor data whose digest was taken
    issues: tuple[str, ...]
    ignored: tuple[str, ...] = ()  # hidden files beside those of the set, which are no part of it


def verify(
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    new_progress: NewProgress = lambda what, total: lambda nbytes: None,
) -> list[Verified]:
    """Check every byte of the sets at `path` against their manifests.

    Args:
        path: a set (`tp4`), a component folder with its sets, an output folder of a pipeline, or one file of a set with
            the manifest beside it.
        source: what the sets were converted from, a folder or a Hub repo id: every slice is cut from it once more,
            after the recorded cast, and compared.
        new_progress: gives for (what, total bytes) a function that is called with bytes just read.

    Returns:
        What was found, one a set.

    Raises:
        SetError: every problem of every set.
        CheckpointError, UsageError: `source` cannot be read.
    """
    found = verify_all(path, source, new_progress)
    issues = [issue for each in found for issue in each.issues]
    if issues:
        raise SetError(*issues)
    return found


def verify_all(
    path: str | os.PathLike[str], source: str | os.PathLike[str] | None, new_progress: NewProgress
) -> list[Verified]:
    """As `verify`, with the problems in the result."""
    path = Path(path)
    if path.is_file():
        return [_verify_file(path, source, new_progress)]
    if (path / MANIFEST_NAME).is_file() or degree_of(path.absolute().name):
        return [_verify_set(path, source, new_progress)]
    found = []
    for component in components_in(path):
        checked = [_verify_set(folder, source, new_progress) for folder in set_folders(path / component)]
        found += [checked[0], *(_beside(each, checked[0]) for each in checked[1:])]
    return found


def _beside(checked: Verified, first: Verified) -> Verified:
    """With an issue when two sets of one component are of different weights."""
    if not checked.manifest or not first.manifest or checked.manifest.source.same_weights(first.manifest.source):
        return checked
    issue = f"{checked.path}: was converted from other weights than {first.path}; convert one of them again, elsewhere"
    return replace(checked, issues=(*checked.issues, issue))


def _verify_file(path: Path, source: str | os.PathLike[str] | None, new_progress: NewProgress) -> Verified:
    if (path.parent / MANIFEST_NAME).is_file():
        return _verify_set(path.parent, source, new_progress, only=path.name)
    try:
        num = len(FileHeader.read(path).tensors)
    except ShardconvError as error:
        return Verified(path, None, 0, error.issues)
    issue = (
        f"{path}: header and length are right ({num} tensors), but what they must hold stands in {MANIFEST_NAME}, "
        "which is not beside it; fetch that too"
    )
    return Verified(path, None, 0, (issue,))


def _verify_set(
    folder: Path, source: str | os.PathLike[str] | None, new_progress: NewProgress, only: str | None = None
) -> Verified:
    """Check the set in `folder`, or of its files `only` one."""
    path = folder / only if only else folder
    try:
        manifest = Manifest.read(folder)
    except ShardconvError as error:
        return Verified(path, None, 0, error.issues)
    names = {record.name for record in manifest.files}
    if only and only not in names:
        return Verified(path, manifest, 0, (f"{path}: not a file of the set beside it; give one of {sorted(names)}",))
    issues = _config_issues(folder, manifest) + (_foreign(folder, names) if not only else [])
    payload, nbytes = _payload_issues(folder, manifest, {only} if only else names, new_progress)
    issues += payload
    if source is not None:
        issues += _source_issues(folder, manifest, source, new_progress)
    ignored = tuple(name for name in sorted(os.listdir(folder)) if is_hidden(name)) if not only else ()
    return Verified(path, manifest, nbytes, tuple(issues), ignored)


def _config_issues(folder: Path, manifest: Manifest) -> list[str]:
    try:
        config, _ = read_config(component_of(folder))
    except ShardconvError as error:
        return list(error.issues)
    if config["_class_name"] == manifest.model_class and config_digest(config) == manifest.config_digest:
        return []
    return [f"{folder.parent / CONFIG_NAME}: not the config that was converted; put the source's back"]


def _foreign(folder: Path, names: Collection[str]) -> list[str]:
    """Files that look like those of a set, and any other, that the manifest does not list."""
    return [
        f"{folder / name}: {'of another set' if is_set_file(name) else 'not a file of a set'}, the manifest does not "
        "list it; move it away"
        for name in sorted(os.listdir(folder))
        if name not in names and name != MANIFEST_NAME and not is_hidden(name)
    ]


def _payload_issues(
    folder: Path, manifest: Manifest, names: Collection[str], new_progress: NewProgress
) -> tuple[list[str], int]:
    """Faults of the files `names`, headers and payload, and how many bytes of payload were read."""
    files, issues = read_files(folder, manifest, names)
    issues = [issue if issue.startswith(str(folder)) else f"{folder / issue}" for issue in issues]
    slices = [(file, entry) for file in files for entry in file.header.tensors]
    extents = [Extent.of(file.path, file.header.data_start, entry) for file, entry in slices]
    nbytes = sum(extent.nbytes for extent in extents)
    digests = engine.digests(extents, new_progress(f"verify {folder.name}", nbytes))
    for (file, entry), digest in zip(slices, digests, strict=True):
        known = manifest.digests[entry.name]
        if not isinstance(digest, str):
            issues.append(f"{file.path}: {entry.name} cannot be read ({digest}); fetch it again")
        elif digest != known[file.rank if len(known) > 1 and file.rank is not None else 0]:
            issues.append(
                f"{file.path}: {entry.name} is damaged (its digest differs from the manifest's); fetch it again"
            )
    return issues, nbytes


def _source_issues(
    folder: Path, manifest: Manifest, source: str | os.PathLike[str], new_progress: NewProgress
) -> list[str]:
    """Where the set is not what converting `source` gives. The slices' digests stand for their bytes."""
    checkpoint = _open_source(source, manifest)
    issues = []
    if config_digest(checkpoint.config) != manifest.config_digest:
        issues.append(f"{folder}: was converted with another config.json than that of {checkpoint.folder}")
    same = []
    for tensor in manifest.tensors:
        expected = _as_converted(tensor, checkpoint, manifest)
        if expected == tensor:
            same.append(tensor)
        else:
            found = f"found {expected.dtype} {list(expected.shape)}" if expected else "which does not have it"
            issues.append(f"{folder}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}, by {source} {found}")
    known = {tensor.name for tensor in manifest.tensors}.union(manifest.left_out)
    issues += [f"{folder}: lacks {name}, which {source} has" for name in checkpoint.tensors if name not in known]
    layout = plan_layout(same, manifest.tp_degree, manifest.self_contained)
    plan = plan_conversion(layout, checkpoint.tensors)
    digests = engine.run(plan, None, new_progress("compare with the source", plan.read_nbytes))
    issues += [
        f"{folder}: {tensor.name} differs from {source} in slices {differing}"
        for tensor in same
        if (differing := _differing(digests[tensor.name].slices, manifest.digests[tensor.name]))
    ]
    return issues


def _open_source(source: str | os.PathLike[str], manifest: Manifest) -> Checkpoint:
    record = manifest.source
    revision = None if Path(source).exists() else record.revision
    folder = locate(source, record.subfolder, revision, record.variant).folder
    component = folder / record.subfolder if record.subfolder else folder
    return open_checkpoint(component if component.is_dir() else folder, record.variant)


def _as_converted(tensor: StoredTensor, checkpoint: Checkpoint, manifest: Manifest) -> StoredTensor | None:
    """What converting the source's tensor of that name gives, with the manifest's settings."""
    held = checkpoint.tensors.get(tensor.name)
    if held is None:
        return None
    kept = [tensor.name] if kept_in_fp32(tensor.name, manifest.keep_fp32) else []
    return stored_tensors([held.entry], {tensor.name: (tensor.style, tensor.cut)}, manifest.cast_to, kept)[0]


def _differing(found: tuple[str, ...], known: tuple[str, ...]) -> list[int]:
    return [rank for rank, (a, b) in enumerate(zip(found, known, strict=True)) if a != b]
