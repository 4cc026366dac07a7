"""`shardconv reshard` as a library call: from a set of one degree to a set of another, without the source."""

from __future__ import annotations

import os
import warnings as python_warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._version import __version__
from ..engine import run as engine
from ..engine.records import RoutePlan
from ..engine.slices import check_digests, slices_of, write_headers
from ..errors import OutputError, SetError, ShardconvWarning, UsageError, every
from ..format.config import config_digest, read_config
from ..format.layout import SetLayout, plan_layout
from ..format.manifest import FileRecord, Manifest
from ..format.names import CONFIG_NAME, MANIFEST_NAME, MODEL_INDEX, set_folder_name
from ..format.pipeline import rest_of_pipeline
from ..format.plan import REPLICATED
from ..format.sets import SetFile, any_set, component_of, components_in, open_files, sets_in
from ..plans.choice import other_plan
from ..system.progress import NewProgress
from ..target.checks import check_component, check_links, check_space, copied_nbytes
from ..target.folder import PartialFolder, unfinished
from ..target.links import link_files
from .convert import standing
from .outcome import Outcome


@dataclass(frozen=True, slots=True)
class _Job:
    """One set, ready to go."""

    component: str
    out: Path  # the component folder to write into
    source: Manifest
    files: Sequence[SetFile]  # of the set that is read
    target: Manifest  # without digests
    layout: SetLayout  # of `target`
    config_bytes: bytes
    warnings: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.out / set_folder_name(self.target.tp_degree)


def reshard(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tp: int,
    self_contained: bool | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write the set at `path` anew for `tp` ranks; the files are those that converting its source for `tp` ranks gives.

    Args:
        path: a set (`tp4`), a component folder (the lowest degree in it is read), or an output folder of a pipeline,
            every sharded component of which is resharded and the rest hard-linked.
        out: the folder to write into; the set goes to `out/tpN`, of a pipeline to `out/<component>/tpN`. May be the
            folder that is read, so that the degrees stand side by side.
        tp: how many ranks share the model; must divide heads and every block, and need not be a multiple of the old
            degree, nor a divisor.
        self_contained: replicated tensors in each rank's file, or once in a shared one; None keeps what the set has.
        overwrite: replace a set of the same degree, in one step.

    Returns:
        The manifest of the set; of a pipeline with several sharded components, that of the first.

    Raises:
        UsageError, PlanError: a degree that converting would refuse, too.
        SetError: the set is incomplete, damaged (every slice read is compared with its digest) or of mixed origin.
        OutputError: `out` holds something else, cannot be written or lacks room. Nothing is left behind.
    """
    outcomes = reshard_all(path, out, tp=tp, self_contained=self_contained, overwrite=overwrite)
    for text in [text for outcome in outcomes for text in outcome.warnings]:
        python_warnings.warn(text, ShardconvWarning, stacklevel=2)
    return outcomes[0].manifest


def reshard_all(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tp: int,
    self_contained: bool | None = None,
    overwrite: bool = False,
    new_progress: NewProgress = lambda what, total: lambda nbytes: None,
) -> list[Outcome]:
    """As `reshard`, with an outcome for each component. All components are checked before one is written."""
    path, out = Path(path), Path(out)
    if type(tp) is not int or tp < 1:
        raise UsageError(f"--tp: expected a positive number of ranks, found {tp}")
    components = components_in(path)
    jobs = every(
        lambda name: _prepare(any_set(path / name), name, out / name, tp, self_contained), components, SetError
    )
    is_pipeline = components != [""] and (path / MODEL_INDEX).is_file() and path.resolve() != out.resolve()
    rest = rest_of_pipeline(path, components) if is_pipeline else []
    issues = [] if overwrite else check_links(path, out, rest)
    there = [None if overwrite else _existing(job) for job in jobs]
    needed = sum(job.layout.nbytes for job, known in zip(jobs, there, strict=True) if known is None)
    issues += check_space(out, needed, copied_nbytes(path, out, rest))
    if issues:
        raise OutputError(*issues)
    outcomes: list[Outcome] = []
    steps = there.count(None) + any(not (out / name).exists() for name in rest)
    with standing(outcomes), unfinished(out, tp, components if is_pipeline else [], steps):
        for job, known in zip(jobs, there, strict=True):
            manifest = known or _execute(job, overwrite, new_progress)
            outcomes.append(Outcome(job.component, job.folder, manifest, job.warnings, known is not None))
        link_files(path, out, rest, overwrite)
    return outcomes


def _prepare(folder: Path, component: str, out: Path, tp: int, self_contained: bool | None) -> _Job:
    source = Manifest.read(folder)
    config, config_bytes = read_config(component_of(folder))
    if config_digest(config) != source.config_digest:
        raise SetError(f"{folder.parent / CONFIG_NAME}: not the config that was converted; put the source's back")
    warnings = _check_degree(source, config, tp)
    files = open_files(folder, source, range(source.tp_degree))
    issues = _check_place(folder, out) or check_component(out, folder, tp, config_bytes)
    issues += [
        f"{sibling}: was converted from other weights than {folder}; name another OUT"
        for degree, sibling in sets_in(out).items()
        if degree != tp and not Manifest.read(sibling).source.same_weights(source.source)
    ]
    if issues:
        raise OutputError(*issues)
    whole = source.self_contained if self_contained is None else self_contained
    layout = plan_layout(source.tensors, tp, whole)
    target = replace(
        source,
        tool_version=__version__,
        conversion_id="",
        tp_degree=tp,
        self_contained=whole,
        digests={},
        files=tuple(FileRecord(file.name, file.rank, file.nbytes, "") for file in layout.files),
    )
    return _Job(component, out, source, files, target, layout, config_bytes, warnings)


def _check_place(folder: Path, out: Path) -> list[str]:
    """An issue when OUT is in the set, or above it but not its component folder."""
    real, place = folder.resolve(), out.resolve()
    if place == real or real in place.parents:
        return [f"{out}: is a set; name its component folder {real.parent}, or a new one"]
    if place in real.parents and place != real.parent:
        return [f"{out}: holds the set {folder}; name its component folder {real.parent}, or a new one"]
    return []


def _check_degree(source: Manifest, config: Mapping[str, Any], tp: int) -> tuple[str, ...]:
    """Refuse what a conversion would refuse, in its words; its warnings.

    What depends on the degree are heads and blocks, and the manifest has both. Only when they say no, or when the set
    is of degree 1, for which less is checked, is the model built and asked.
    """
    blocks = [size for tensor in source.tensors if tensor.cut for size in tensor.cut.block_sizes]
    if not any(size % tp for size in (*source.head_counts, *blocks)) and (source.tp_degree > 1 or tp == 1):
        return ()
    from ..libraries.choose import model_class
    from ..libraries.skeleton import skeleton
    from ..plans.resolve import resolve

    cls = model_class(source.model_class, config)
    model = skeleton(cls, config)
    resolution = resolve(model, source.plan, tp, other_plan(model))
    issues = [
        f"{tensor.name}: this diffusers' {cls.__name__} is cut otherwise than the set; convert the source again"
        for tensor in source.tensors
        if resolution.cuts.get(tensor.name, (REPLICATED, None))[1] != tensor.cut
    ]
    if issues:
        raise SetError(*issues)
    return resolution.warnings


def _existing(job: _Job) -> Manifest | None:
    """The complete set that already stands where this one would go, when it is the same.

    Raises `OutputError` when it is another one, `SetError` when it is damaged.
    """
    if not job.folder.is_dir():
        return None
    if not (job.folder / MANIFEST_NAME).exists():
        raise OutputError(f"{job.folder}: has no {MANIFEST_NAME}, so it is not a complete set; move it away")
    there = Manifest.read(job.folder)
    wanted, found = job.target.settings(), there.settings()
    different = [key for key in wanted if wanted[key] != found[key]]
    if not different and there.source.same_weights(job.target.source):
        open_files(job.folder, there, range(there.tp_degree))
        return there
    why = ", ".join(different) if different else "the source's bytes"
    raise OutputError(f"{job.folder}: holds another conversion (differs in {why}); add --overwrite to replace it")


def _execute(job: _Job, overwrite: bool, new_progress: NewProgress) -> Manifest:
    plan = RoutePlan(job.layout.tensors, slices_of(job.source, job.files), job.layout.starts)
    progress = new_progress("reshard", plan.read_nbytes)
    with PartialFolder(job.folder) as partial:
        outputs = partial.create({file.name: file.nbytes for file in job.layout.files})
        digests = engine.reroute(plan, outputs, progress)
        check_digests(job.source, digests)
        manifest = replace(job.target, digests={name: each.written for name, each in digests.items()})
        manifest = write_headers(manifest, job.layout, outputs)
        partial.write_beside(CONFIG_NAME, job.config_bytes)
        partial.publish({MANIFEST_NAME: manifest.to_json().encode()}, overwrite)
    return manifest
