"""Everything of a conversion that is decided before a weight is read: the model, the plan, the layout, the faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .._version import __version__
from ..errors import CheckpointError, OutputError, PlanError, as_one, every
from ..format.config import config_digest
from ..format.layout import ConvertPlan, StoredTensor, plan_layout, stored_tensors
from ..format.manifest import FileRecord, Manifest, Source, SourceFileRecord
from ..format.names import set_folder_name
from ..format.plan import Plan
from ..format.weights import check_variant, shorten
from ..libraries.diffusers import kept_in_fp32
from ..plans.facts import ModelFacts
from ..plans.planner import Planner
from ..source.checkpoint import Checkpoint, match_names, open_checkpoint, unexpected_names
from ..source.locate import Located, components
from ..target.folder import check_target

DTYPES: Mapping[str, str] = {
    "bf16": "BF16", "bfloat16": "BF16", "fp16": "F16", "float16": "F16", "fp32": "F32", "float32": "F32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """What a person may choose about a conversion."""

    tp: int
    variant: str | None = None
    dtype: str | None = None  # a key of DTYPES
    plan: Plan | Literal["auto-rows"] | None = None  # None: the class's own
    lean: bool = False  # also cut modulation and embedders
    self_contained: bool = False
    overwrite: bool = False
    dry_run: bool = False
    low_disk: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a dry run tells beside the manifest."""

    degrees: tuple[int, ...]  # the tp degrees up to 16 that the plan allows
    rank_nbytes: Mapping[str, int]  # of one rank, "plain" and "lean" where there is such a plan; empty for another plan


@dataclass(frozen=True, slots=True)
class Job:
    """One component, ready to go."""

    component: str
    out: Path
    checkpoint: Checkpoint
    manifest: Manifest  # without digests
    plan: ConvertPlan
    tied: Sequence[tuple[str, ...]]  # names that are one parameter
    warnings: tuple[str, ...]
    forecast: Forecast | None  # of a dry run

    @property
    def folder(self) -> Path:
        return self.out / set_folder_name(self.manifest.tp_degree)


def prepare(located: Located, subfolder: str | None, out: Path, options: Options) -> list[Job]:
    """The job of every component to shard. Raises what is wrong with any of them, in one error; of a repo's files it
    speaks by their names in the repo."""
    with Planner(needs_torch=options.dtype is not None) as planner:
        with located.speaking():
            names = components(located, subfolder, options.plan is not None, planner)
            if not located.snapshot:
                check_variant(located.folder / (subfolder or ""), located.names(subfolder), options.variant)
        return every(lambda name: _prepare(located, name, out, options, planner), names, CheckpointError)


def _prepare(located: Located, component: str, out: Path, options: Options, planner: Planner) -> Job:
    """Check everything that can be checked without reading weights; one error for all faults of a component."""
    with located.speaking(component, out):
        return _prepared(located, component, out, options, planner)


def _prepared(located: Located, component: str, out: Path, options: Options, planner: Planner) -> Job:
    elsewhere = located.snapshot.names_in(component) if located.snapshot else ()
    checkpoint = open_checkpoint(located.folder / component, options.variant, elsewhere)
    model = planner.facts(checkpoint.config, options.plan, options.tp, options.lean)
    aliases = _aliases(checkpoint, model.tied)
    target = out / component
    _check(checkpoint, model, aliases, check_target(target, checkpoint.folder, options.tp, checkpoint.config_bytes))
    sources = {name: source for name, source in checkpoint.tensors.items() if name in model.tensors}
    cast_to = DTYPES[options.dtype] if options.dtype else None
    fp32 = model.fp32_modules if cast_to else ()
    kept = [name for name in sources if kept_in_fp32(name, fp32)]
    tensors = stored_tensors(sources.values(), model.cuts, cast_to, kept)
    layout = plan_layout(tensors, options.tp, options.self_contained)
    manifest = Manifest(
        tool_version=__version__,
        conversion_id="",
        source=_source_record(located, component, checkpoint),
        model_class=checkpoint.class_name,  # as published, also where diffusers has another name for it now
        config_digest=config_digest(checkpoint.config),
        library_version=model.library_version,
        tp_degree=options.tp,
        self_contained=options.self_contained,
        cast_to=cast_to,
        keep_fp32=fp32,
        plan=model.plan,
        head_counts=model.head_counts,
        tensors=tuple(tensors),
        digests={},
        aliases=aliases,
        left_out=tuple(name for name in checkpoint.tensors if name not in model.tensors),
        files=tuple(FileRecord(file.name, file.rank, file.nbytes, "") for file in layout.files),
    )
    warnings = [*checkpoint.warnings, *model.warnings]
    loud = unexpected_names(checkpoint, model.tensors, model.ignored)
    if loud:
        what = f"tensors that {model.model_class} does not have"
        warnings.append(f"{checkpoint.folder}: {what} are left out: {shorten(loud)}")
    forecast = _forecast(checkpoint, model, tensors, options, planner) if options.dry_run else None
    plan = ConvertPlan(layout, sources)
    told = map(located.snapshot.spoken, warnings) if located.snapshot else warnings
    return Job(component, target, checkpoint, manifest, plan, model.tied, tuple(told), forecast)


def _forecast(
    checkpoint: Checkpoint, model: ModelFacts, tensors: Sequence[StoredTensor], options: Options, planner: Planner
) -> Forecast:
    if options.plan is not None:
        return Forecast(model.degrees, {})
    other = planner.facts(checkpoint.config, None, options.tp, not options.lean)
    pair = (other, model) if options.lean else (model, other)
    return Forecast(model.degrees, _rank_nbytes(tensors, pair, options.tp))


def _rank_nbytes(tensors: Sequence[StoredTensor], plain_and_lean: Sequence[ModelFacts], tp: int) -> dict[str, int]:
    """What one rank would hold under either plan; one that does not fit is left out."""
    return {
        name: sum(replace(each, cut=model.cuts.get(each.name, (None, None))[1]).slice_nbytes(tp) for each in tensors)
        for name, model in zip(("plain", "lean"), plain_and_lean, strict=True)
        if not model.plan_issues
    }


def _check(checkpoint: Checkpoint, model: ModelFacts, aliases: Mapping[str, str], target_issues: Sequence[str]) -> None:
    """Raise every fault of one component at once."""
    required = {name: shape for name, shape in model.tensors.items() if name not in aliases}
    issues = match_names(checkpoint, required, model.ignored) + _shape_issues(checkpoint, model.tensors)
    plan_issues = list(model.plan_issues)
    if not plan_issues and not any(cut for _, cut in model.cuts.values()):
        plan_issues = [f"{checkpoint.folder}: the model has none of the layers that the plan names"]
    found = ((CheckpointError, issues), (OutputError, target_issues), (PlanError, plan_issues))
    errors = [kind(*texts) for kind, texts in found if texts]
    if errors:
        raise as_one(errors, CheckpointError)


def _aliases(checkpoint: Checkpoint, tied: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """Names that are not stored -> a stored name that is the same parameter."""
    result: dict[str, str] = {}
    for group in tied:
        stored = [name for name in group if name in checkpoint.tensors]
        result |= {name: stored[0] for name in group if stored and name not in checkpoint.tensors}
    return result


def _shape_issues(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{name}: expected shape {list(shape)} by config.json, found {list(held.entry.shape)} in {held.file.name}; "
        "config and weights are of different models"
        for name, shape in expected.items()
        if (held := checkpoint.tensors.get(name)) is not None and held.entry.shape != shape
    ]


def _source_record(located: Located, component: str, checkpoint: Checkpoint) -> Source:
    files = tuple(
        SourceFileRecord(f.name, f.header.file_nbytes, f.header.digest, "", f.header.metadata) for f in checkpoint.files
    )
    return Source(located.repo, located.commit, component or None, checkpoint.variant, files)
