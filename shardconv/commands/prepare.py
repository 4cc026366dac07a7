"""Everything of a conversion that is decided before a weight is read: the model, the plan, the layout, the faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .._version import __version__
from ..engine.records import ConvertPlan, Extent, TensorSource
from ..engine.transform import Cast
from ..errors import CheckpointError, OutputError, PlanError, as_one, every
from ..format.config import config_digest
from ..format.layout import SetLayout, StoredTensor, plan_layout, stored_tensors
from ..format.manifest import FileRecord, Manifest, Source, SourceFileRecord
from ..format.names import set_folder_name
from ..format.plan import OWN, PlanChoice
from ..format.weights import check_variant, shorten
from ..libraries.choose import library_for
from ..libraries.skeleton import kept_in_fp32
from ..plans.facts import ModelFacts
from ..plans.planner import Planner
from ..source.checkpoint import Checkpoint, SourceTensor, open_checkpoint
from ..source.locate import Located
from ..source.unmatched import match_names, unexpected_names
from ..target.checks import check_target
from .components import chosen_components
from .options import DTYPES, Options


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
            names, remarks = chosen_components(located, subfolder, options, planner)
            if not located.snapshot:
                check_variant(located.folder / (subfolder or ""), located.names(subfolder), options.variant)
        jobs = every(lambda name: _prepare(located, name, out, options, planner), names, CheckpointError)
    return [replace(jobs[0], warnings=(*jobs[0].warnings, *remarks)), *jobs[1:]]


def _prepare(located: Located, component: str, out: Path, options: Options, planner: Planner) -> Job:
    """Check everything that can be checked without reading weights; one error for all faults of a component."""
    with located.speaking(component, out):
        return _prepared(located, component, out, options, planner)


def _prepared(located: Located, component: str, out: Path, options: Options, planner: Planner) -> Job:
    elsewhere = located.snapshot.names_in(component) if located.snapshot else ()
    checkpoint = open_checkpoint(located.folder / component, options.variant, elsewhere)
    takes_lean = library_for(checkpoint.config).has_plans or not options.plan.is_own
    choice = options.plan if takes_lean else OWN
    model = planner.facts(checkpoint.config, choice, options.tp)
    aliases = _aliases(checkpoint, model.tied)
    target = out / component
    _check(checkpoint, model, aliases, check_target(target, checkpoint.folder, options.tp, checkpoint.config_bytes))
    entries = {name: held.entry for name, held in checkpoint.tensors.items() if name in model.tensors}
    cast_to = DTYPES[options.dtype] if options.dtype else None
    fp32 = model.fp32_modules[cast_to] if cast_to else ()
    kept = [name for name in entries if kept_in_fp32(name, fp32)]
    tensors = stored_tensors(entries.values(), model.cuts, cast_to, kept)
    layout = plan_layout(tensors, options.tp, options.self_contained)
    manifest = Manifest(
        tool_version=__version__,
        conversion_id="",
        source=_source_record(located, component, checkpoint),
        model_class=checkpoint.class_name,  # as published, also where diffusers has another name for it now
        config_digest=config_digest(checkpoint.config),
        library_name=model.library_name,
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
    loud = unexpected_names(checkpoint.tensors, model.tensors, model.ignored)
    if loud:
        what = f"tensors that {model.model_class} does not have"
        warnings.append(f"{checkpoint.folder}: {what} are left out: {shorten(loud)}")
    forecast = _forecast(checkpoint, model, tensors, options, planner) if options.dry_run else None
    plan = plan_conversion(layout, checkpoint.tensors)
    told = map(located.snapshot.spoken, warnings) if located.snapshot else warnings
    return Job(component, target, checkpoint, manifest, plan, model.tied, tuple(told), forecast)


def _forecast(
    checkpoint: Checkpoint, model: ModelFacts, tensors: Sequence[StoredTensor], options: Options, planner: Planner
) -> Forecast:
    if not options.plan.is_own:
        return Forecast(model.degrees, {})
    is_lean = options.plan.kind == "lean"
    other = planner.facts(checkpoint.config, PlanChoice("own" if is_lean else "lean"), options.tp)
    pair = (other, model) if is_lean else (model, other)
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
    issues = match_names(checkpoint.tensors, required, model.ignored) + _shape_issues(checkpoint, model.tensors)
    plan_issues = list(model.plan_issues)
    if not plan_issues and not any(cut for _, cut in model.cuts.values()):
        plan_issues = [f"{checkpoint.folder}: the model has none of the layers that the plan names"]
    found = ((CheckpointError, issues), (OutputError, target_issues), (PlanError, plan_issues))
    errors = [kind(*texts) for kind, texts in found if texts]
    if errors:
        raise as_one(errors, CheckpointError)


def plan_conversion(layout: SetLayout, tensors: Mapping[str, SourceTensor]) -> ConvertPlan:
    """What the engine has to do to fill `layout` from the source's `tensors` of the same names."""
    sources = {}
    for tensor in layout.tensors:
        held = tensors[tensor.name]
        extent = Extent.of(held.file.path, held.file.header.data_start, held.entry)
        sources[tensor.name] = TensorSource(extent, Cast(held.entry.dtype, tensor.dtype))
    return ConvertPlan(layout, sources)


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
