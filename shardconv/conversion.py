"""`shardconv convert` as a library call: source -> plan -> layout -> engine -> set."""

from __future__ import annotations

import json
import os
import warnings as python_warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from . import engine
from ._version import __version__
from .auto_rows import AUTO_ROWS, auto_rows
from .checkpoint import (
    CONFIG_NAME,
    MANIFEST_NAME,
    WEIGHTS_STEM,
    Checkpoint,
    config_digest,
    leads_out,
    match_names,
    open_checkpoint,
    read_config,
    refuse_file,
    shorten,
    unexpected_names,
)
from .destination import PartialFolder, check_links, check_space, check_target, link_files, set_folder_name, sets_in
from .errors import CheckpointError, OutputError, PlanError, SetError, ShardconvError, ShardconvWarning, UsageError
from .layout import ConvertPlan, StoredTensor, file_header, plan_layout, stored_tensors
from .manifest import FileRecord, Manifest, Source, SourceFileRecord
from .pagecache import ReadAhead, is_cached
from .plan import Plan, parse_plan, read_plan_file
from .resolve import degrees_of, resolve
from .sets import open_files

DTYPES: Mapping[str, str] = {
    "bf16": "BF16", "bfloat16": "BF16", "fp16": "F16", "float16": "F16", "fp32": "F32", "float32": "F32",
}  # fmt: skip
MODEL_INDEX = "model_index.json"
READ_AHEAD_NBYTES = 6 * 1000**3  # what a disk gives while Python imports; more could push out what is needed first


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


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a dry run tells beside the manifest."""

    degrees: tuple[int, ...]  # the tp degrees up to 16 that the plan allows
    rank_nbytes: Mapping[str, int]  # of one rank, "plain" and "lean" where there is such a plan; empty for another plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one component."""

    component: str  # "" when the source was the component itself
    folder: Path  # of the set
    manifest: Manifest
    warnings: tuple[str, ...]
    was_there: bool  # the same set stood there already, so nothing was written
    forecast: Forecast | None = None  # of a dry run


NewProgress = Callable[[str, int], "engine.Progress"]  # (what, total bytes) -> called with bytes just dealt with


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tp: int,
    subfolder: str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    dtype: Any = None,
    plan: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    lean: bool = False,
    self_contained: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Manifest:
    """Pre-shard a diffusers checkpoint for `tp` ranks.

    Args:
        source: a component folder, a pipeline folder (every component whose class has a plan is sharded, the others are
            hard-linked), or a Hub repo id.
        out: the folder to write into; a set goes to `out/tpN`, for a pipeline or with `subfolder` to
            `out/<component>/tpN`.
        tp: how many ranks share the model; must divide heads and every block.
        subfolder: take this component alone.
        variant: weight files of this variant (`fp16`, `bf16`), as in `from_pretrained`.
        revision: branch, tag or commit of a Hub repo.
        dtype: `bf16`, `fp16`, `fp32` or torch's dtype; casts real floating point only and keeps the class's
            `_keep_in_fp32_modules` in fp32. None stores what the source has, unchanged.
        plan: a plan file, the map it would hold, or `"auto-rows"`: every `Linear` as rowwise_split_input, for a class
            without a plan. None takes the class's own.
        lean: also cut the modulation and embedder projections that the class's plan leaves whole.
        self_contained: write replicated tensors into each rank's file instead of once into a shared one.
        overwrite: replace a set of the same degree, in one step.
        dry_run: read headers and configs only, write nothing.

    Returns:
        The manifest of the set; of a pipeline with several sharded components, that of the first.

    Raises:
        UsageError, CheckpointError, PlanError, OutputError: before work starts where that is possible, with every fault
            found; nothing is left behind. Advice that does not stop the work comes as `ShardconvWarning`.
    """
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    options = Options(tp, variant, name, _as_plan(plan), lean, self_contained, overwrite, dry_run)
    outcomes = convert_all(source, out, options, subfolder=subfolder, revision=revision)
    for text in [text for outcome in outcomes for text in outcome.warnings]:
        python_warnings.warn(text, ShardconvWarning, stacklevel=2)
    return outcomes[0].manifest


def _as_plan(plan: Mapping[str, Any] | str | os.PathLike[str] | None) -> Plan | Literal["auto-rows"] | None:
    if plan is None or isinstance(plan, Mapping):
        return None if plan is None else parse_plan(plan, "plan")
    return "auto-rows" if plan == AUTO_ROWS else read_plan_file(plan)


@dataclass(frozen=True, slots=True)
class _Job:
    """One component, ready to go."""

    component: str
    out: Path
    checkpoint: Checkpoint
    manifest: Manifest  # without digests
    plan: ConvertPlan
    tied: Sequence[tuple[str, ...]]  # names that are one parameter
    warnings: tuple[str, ...]
    forecast: Forecast | None

    @property
    def folder(self) -> Path:
        return self.out / set_folder_name(self.manifest.tp_degree)


def convert_all(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Options,
    *,
    subfolder: str | None = None,
    revision: str | None = None,
    new_progress: NewProgress = lambda what, total: lambda nbytes: None,
) -> list[Outcome]:
    """As `convert`, with an outcome for each sharded component. All components are checked before one is written."""
    if type(options.tp) is not int or options.tp < 1:
        raise UsageError(f"--tp: expected a positive number of ranks, found {options.tp}")
    if Path(source).is_dir() and Path(source).resolve() in Path(out).resolve().parents:
        raise OutputError(f"{out}: lies inside the source {source}, which stays as it is; name another OUT")
    if options.lean and options.plan is not None:
        raise UsageError("--lean: adds to the class's own plan, and --plan replaces it; give one of them")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UsageError(f"--dtype: expected one of {', '.join(DTYPES)}, found {options.dtype!r}")
    if subfolder is not None and (Path(subfolder).is_absolute() or ".." in Path(subfolder).parts):
        raise UsageError(f"--subfolder: expected a folder inside the source, found {subfolder!r}")
    out = Path(out)
    located = _locate(source, subfolder, revision, options.variant)
    cold = _cold_weights(located.folder, subfolder)
    with ReadAhead(cold, 0 if options.dry_run else READ_AHEAD_NBYTES):
        components = _components(located, subfolder, options)
        jobs = _prepare_all(located, components, out, options)
    for job in jobs:
        _check_siblings(job, job.manifest)
    rest = _rest_of_pipeline(located.folder, components) if located.is_pipeline and subfolder is None else []
    issues = check_links(located.folder, out, rest)
    if issues:
        raise OutputError(*issues)
    there = [_existing(job, options, new_progress) for job in jobs]
    if options.dry_run:
        return [Outcome(job.component, job.folder, job.manifest, job.warnings, False, job.forecast) for job in jobs]
    needed = sum(job.plan.layout.nbytes for job, known in zip(jobs, there, strict=True) if known is None)
    issues = check_space(out, needed) if needed else []
    if issues:
        raise OutputError(*issues)
    outcomes = []
    for job, known in zip(jobs, there, strict=True):
        manifest = known or _execute(job, options.overwrite, cold, new_progress)
        outcomes.append(Outcome(job.component, job.folder, manifest, job.warnings, known is not None))
    link_files(located.folder, out, rest)
    return outcomes


def _cold_weights(folder: Path, subfolder: str | None) -> list[Path]:
    """Weight files that are probably converted and not in memory: read while torch and diffusers are imported."""
    places = [folder / subfolder] if subfolder else [folder, *folder.glob("transformer*")]
    paths = [path for place in places for path in sorted(place.glob(f"{WEIGHTS_STEM}*.safetensors"))]
    return [path for path in paths if path.is_file() and not is_cached(path)]


@dataclass(frozen=True, slots=True)
class _Located:
    """A source on this disk."""

    folder: Path
    repo: str | None
    commit: str | None

    @property
    def is_pipeline(self) -> bool:
        return (self.folder / MODEL_INDEX).is_file()


def _locate(
    source: str | os.PathLike[str], subfolder: str | None, revision: str | None, variant: str | None
) -> _Located:
    path = Path(source)
    if path.exists() and revision is not None:
        raise UsageError(f"--revision: of a Hub repo; {path} is here, a revision cannot be chosen; leave it out")
    if path.is_dir():
        return _Located(path, None, None)
    if path.is_file():
        raise refuse_file(path)
    name = os.fspath(source)
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise CheckpointError(f"{name}: no such folder; give a diffusers folder or a Hub repo id such as org/name")
    from . import hub

    snapshot = hub.fetch(name, revision, subfolder, variant)
    return _Located(snapshot.folder, name, snapshot.commit)


def _components(located: _Located, subfolder: str | None, options: Options) -> list[str]:
    """Names of the component folders to shard; "" for the source folder itself."""
    if subfolder is not None:
        if not (located.folder / subfolder).is_dir():
            raise CheckpointError(f"{located.folder}: no folder {subfolder!r} in it; check --subfolder")
        return [Path(subfolder).as_posix()]
    if not located.is_pipeline:
        return [""]
    if options.plan is not None:
        raise UsageError("--plan: names modules of one model, the source is a pipeline; add --subfolder COMPONENT")
    from .models import has_plan, model_class

    listed = pipeline_components(located.folder)
    absent = [str(located.folder / name) for name in listed if not (located.folder / name).is_dir()]
    if absent:
        raise CheckpointError(f"{located.folder}: {MODEL_INDEX} names {', '.join(absent)}, no such folder; fetch it")
    for name, (library, cls) in listed.items():
        config = located.folder / name / CONFIG_NAME
        if library == "diffusers" and name.startswith("transformer") and config.is_file():
            model_class(cls, read_config(config.parent)[0].get("_diffusers_version"))  # raises when it is unknown
    chosen = [name for name, (library, cls) in listed.items() if has_plan(library, cls)]
    if not chosen:
        classes = ", ".join(f"{name} ({cls})" for name, (_, cls) in listed.items())
        raise PlanError(
            f"{located.folder}: no component has a class with a _tp_plan, found {classes or 'none'}; give a plan with "
            "--subfolder COMPONENT --plan FILE"
        )
    return chosen


def pipeline_components(folder: Path) -> dict[str, tuple[str, str]]:
    """Component -> (library, class) from `model_index.json`, absent ones left out. Raises `CheckpointError`."""
    path = folder / MODEL_INDEX
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object; fetch it again")
    result = {}
    for name, value in document.items():
        if not name.startswith("_") and isinstance(value, list) and len(value) == 2 and value[1] is not None:
            result[name] = (str(value[0]), str(value[1]))
            if not name.isidentifier():
                raise CheckpointError(f"{path}: expected component names, found {name!r}; do not trust it")
    return result


def _prepare_all(located: _Located, components: Sequence[str], out: Path, options: Options) -> list[_Job]:
    """Every component's job; the faults of all of them in one error."""
    jobs: list[_Job] = []
    errors: list[ShardconvError] = []
    for name in components:
        try:
            jobs.append(_prepare(located, name, out, options))
        except ShardconvError as error:
            errors.append(error)
    if errors:
        kind = type(errors[0]) if len({type(error) for error in errors}) == 1 else CheckpointError
        raise kind(*(issue for error in errors for issue in error.issues))
    return jobs


def _prepare(located: _Located, component: str, out: Path, options: Options) -> _Job:
    """Check everything that can be checked without reading weights; one error for all faults of a component."""
    from . import models

    checkpoint = open_checkpoint(located.folder / component, options.variant)
    cls = models.model_class(checkpoint.class_name, checkpoint.config.get("_diffusers_version"))
    model = models.skeleton(cls, checkpoint.config)
    plan = _plan(model, options)
    expected = models.stored_tensors(model)
    tied = models.tied_names(model)
    aliases = _aliases(checkpoint, tied)
    errors: list[ShardconvError] = []
    required = {name: shape for name, shape in expected.items() if name not in aliases}
    issues = match_names(checkpoint, required, models.ignored_patterns(cls)) + _shape_issues(checkpoint, expected)
    if issues:
        errors.append(CheckpointError(*issues))
    target = out / component
    issues = check_target(target, checkpoint.folder, options.tp, checkpoint.config_bytes)
    if issues:
        errors.append(OutputError(*issues))
    try:
        resolution = resolve(model, plan, options.tp, models.other_plan(model))
    except PlanError as error:
        errors.append(error)
    else:
        if not any(cut for _, cut in resolution.cuts.values()):
            errors.append(PlanError(f"{checkpoint.folder}: the model has none of the layers that the plan names"))
    if errors:
        kind = type(errors[0]) if len(errors) == 1 else CheckpointError
        raise kind(*(issue for error in errors for issue in error.issues))
    sources = {name: source for name, source in checkpoint.tensors.items() if name in expected}
    cast_to = DTYPES[options.dtype] if options.dtype else None
    fp32 = models.keep_in_fp32(cls) if cast_to else ()
    kept = [name for name in sources if models.kept_in_fp32(name, fp32)]
    tensors = stored_tensors(sources.values(), resolution.cuts, cast_to, kept)
    layout = plan_layout(tensors, options.tp, options.self_contained)
    left_out = [name for name in checkpoint.tensors if name not in expected]
    manifest = Manifest(
        tool_version=__version__,
        conversion_id="",
        source=_source_record(located, component, checkpoint),
        model_class=cls.__name__,
        config_digest=config_digest(checkpoint.config),
        library_version=_library_version(),
        tp_degree=options.tp,
        self_contained=options.self_contained,
        cast_to=cast_to,
        keep_fp32=fp32,
        plan=plan,
        tensors=tuple(tensors),
        digests={},
        aliases=aliases,
        left_out=tuple(left_out),
        files=tuple(FileRecord(file.name, file.rank, file.nbytes, "") for file in layout.files),
    )
    unchecked = models.unchecked(model) if options.plan is None else None
    warnings = [*checkpoint.warnings, *resolution.warnings, *filter(None, [unchecked])]
    loud = unexpected_names(checkpoint, expected, models.ignored_patterns(cls))
    if loud:
        warnings.append(f"{checkpoint.folder}: tensors that {cls.__name__} does not have are left out: {shorten(loud)}")
    forecast = _forecast(model, plan, tensors, options) if options.dry_run else None
    return _Job(component, target, checkpoint, manifest, ConvertPlan(layout, sources), tied, tuple(warnings), forecast)


def _plan(model: Any, options: Options) -> Plan:
    from . import models

    if options.plan == AUTO_ROWS:
        return auto_rows(model, options.tp)
    if options.plan is not None and not isinstance(options.plan, str):
        return options.plan
    return models.class_plan(model, options.tp if options.lean else None)


def _forecast(model: Any, plan: Plan, tensors: Sequence[StoredTensor], options: Options) -> Forecast:
    sizes = _rank_nbytes(model, tensors, options) if options.plan is None else {}
    return Forecast(tuple(degrees_of(model, plan)), sizes)


def _rank_nbytes(model: Any, tensors: Sequence[StoredTensor], options: Options) -> dict[str, int]:
    """What one rank would hold, with and without `lean`."""
    sizes = {}
    for name, lean in (("plain", False), ("lean", True)):
        try:
            cuts = resolve(model, _plan(model, replace(options, lean=lean)), options.tp).cuts
        except PlanError:  # nothing to add for memory
            continue
        planned = (replace(tensor, cut=cuts.get(tensor.name, (None, None))[1]) for tensor in tensors)
        sizes[name] = sum(tensor.slice_nbytes(options.tp) for tensor in planned)
    return sizes


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


def _source_record(located: _Located, component: str, checkpoint: Checkpoint) -> Source:
    files = tuple(
        SourceFileRecord(f.name, f.header.file_nbytes, f.header.digest, "", f.header.metadata) for f in checkpoint.files
    )
    return Source(located.repo, located.commit, component or None, checkpoint.variant, files)


def _library_version() -> str:
    import diffusers

    return str(diffusers.__version__)


def _existing(job: _Job, options: Options, new_progress: NewProgress) -> Manifest | None:
    """The complete set that already stands where this one would go, when it is the same.

    "The same" trusts no name, size or time stamp: the source is read and its digests are compared with those in the
    manifest. Raises `OutputError` when the set is another one and `overwrite` was not asked for.
    """
    if not job.folder.is_dir() or options.overwrite:
        return None
    if not (job.folder / MANIFEST_NAME).exists():
        raise OutputError(f"{job.folder}: has no {MANIFEST_NAME}, so it is not a complete set; move it away")
    there = Manifest.read(job.folder)
    wanted, found = job.manifest.settings(), there.settings()
    different = [key for key in wanted if wanted[key] != found[key]]
    if not different:
        try:
            open_files(job.folder, there, range(there.tp_degree))
        except SetError as error:
            raise OutputError(*(f"{issue}; or add --overwrite" for issue in error.issues)) from None
        if options.dry_run:  # it reads no weights, so it cannot tell more
            return there
        progress = new_progress("compare", job.plan.read_nbytes)
        if _with_source_digests(job, engine.digest_sources(job.plan, progress)).source.files == there.source.files:
            return there
    why = ", ".join(different) if different else "the source's bytes"
    raise OutputError(f"{job.folder}: holds another conversion (differs in {why}); add --overwrite to replace it")


def _with_source_digests(job: _Job, digests: Mapping[str, str]) -> Manifest:
    """The job's manifest with a digest for each source file: over its header's and its tensors', in file order."""
    records = []
    for file, record in zip(job.checkpoint.files, job.manifest.source.files, strict=True):
        digest = xxhash.xxh3_128(record.header_digest.encode())
        for entry in file.header.tensors:
            digest.update(digests.get(entry.name, "").encode())
        records.append(replace(record, digest=digest.hexdigest()))
    return replace(job.manifest, source=replace(job.manifest.source, files=tuple(records)))


def _check_siblings(job: _Job, manifest: Manifest) -> None:
    """Sets of several degrees under one config.json must come from one source.

    Before the conversion lengths and headers are compared, after it (`manifest` has digests then) every byte.
    """
    for degree, folder in sets_in(job.out).items():
        if degree == manifest.tp_degree:
            continue
        there = Manifest.read(folder).source.files
        known = [replace(record, digest="") if not mine.digest else record for record, mine in
                 zip(there, manifest.source.files, strict=False)]  # fmt: skip
        if len(there) != len(manifest.source.files) or tuple(known) != manifest.source.files:
            raise OutputError(f"{folder}: was converted from other weights than these; name another OUT")


def _execute(job: _Job, overwrite: bool, cold: Sequence[Path], new_progress: NewProgress) -> Manifest:
    layout = job.plan.layout
    progress = new_progress("convert", job.plan.read_nbytes)
    try:
        with PartialFolder(job.folder) as partial:
            outputs = partial.create({file.name: file.nbytes for file in layout.files})
            digests = engine.run(job.plan, outputs, progress, cold)
            _check_tied(job, digests)
            manifest = _with_source_digests(job, {name: each.source for name, each in digests.items()})
            _check_siblings(job, manifest)
            manifest = replace(manifest, digests={name: each.slices for name, each in digests.items()})
            manifest = replace(manifest, conversion_id=manifest.identity())
            records = []
            for file, fd in zip(layout.files, outputs, strict=True):
                header = file_header(file, manifest.conversion_id, layout.tp)
                engine.write_all(fd, memoryview(header), 0)
                records.append(FileRecord(file.name, file.rank, file.nbytes, xxhash.xxh3_128_hexdigest(header)))
            manifest = replace(manifest, files=tuple(records))
            partial.write_beside(CONFIG_NAME, job.checkpoint.config_bytes)
            partial.publish({MANIFEST_NAME: manifest.to_json().encode()}, overwrite)
    except OSError as error:
        if isinstance(error, ShardconvError):
            raise
        raise OutputError(f"{job.folder}: {error.strerror}; nothing was left behind") from error
    return manifest


def _check_tied(job: _Job, digests: Mapping[str, engine.TensorDigests]) -> None:
    """Two stored names of one parameter must hold the same bytes; only reading them can tell."""
    for group in job.tied:
        stored = [name for name in group if name in digests]
        if len({digests[name].source for name in stored}) > 1:
            raise CheckpointError(
                f"{stored[0]}: the model ties it to {stored[1]}, but the checkpoint stores different bytes for them; "
                "save the model again"
            )


def _rest_of_pipeline(folder: Path, sharded: Sequence[str]) -> list[str]:
    """Everything else that belongs to the pipeline, relative to its folder: `model_index.json`, licence and card, the
    other components. Raises `CheckpointError` for links that lead out of it."""
    about = ("LICENSE", "README", "NOTICE")
    names = [MODEL_INDEX]
    names += [
        name for name in sorted(os.listdir(folder)) if name.upper().startswith(about) and (folder / name).is_file()
    ]
    for component in pipeline_components(folder):
        if component not in sharded and (folder / component).is_dir():
            inside = (path for path in (folder / component).rglob("*") if path.is_file())
            names += sorted(str(path.relative_to(folder)) for path in inside)
    outside = {name: leads_out(folder / name, folder) for name in names}
    issues = [
        f"{name}: a link that leads out of its folder, to {real}; put the file itself there"
        for name, real in outside.items()
        if real is not None
    ]
    if issues:
        raise CheckpointError(*issues)
    return names
