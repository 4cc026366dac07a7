"""`shardconv convert` as a library call: source -> plan -> layout -> engine -> set."""

from __future__ import annotations

import os
import warnings as python_warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from ..engine import run as engine
from ..engine.records import TensorDigests
from ..engine.slices import write_headers
from ..errors import CheckpointError, Interrupted, OutputError, SetError, ShardconvWarning, UsageError
from ..format.manifest import Manifest
from ..format.names import CONFIG_NAME, MANIFEST_NAME
from ..format.plan import PlanChoice
from ..format.sets import open_files
from ..source.locate import Located, cold_weights, locate
from ..system.pagecache import ReadAhead
from ..system.progress import NewProgress
from ..target.checks import check_space
from ..target.folder import PartialFolder, unfinished
from ..target.journal import Journal, conversion_key, finished
from ..target.leftovers import clear_leftovers, leftover_nbytes
from .options import DTYPES, Options
from .outcome import Outcome, check_siblings
from .prepare import Job, prepare
from .rest import FolderRest, Rest, rest_of
from .writer import FromFiles, LowDisk, Writer

READ_AHEAD_NBYTES = 6 * 1000**3  # what a disk gives while Python imports; more could push out what is needed first


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
    low_disk: bool = False,
    only: Sequence[str] = (),
    whole: Sequence[str] = (),
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
        low_disk: of a Hub repo, have one weight file at a time on this disk, beside what is written, none in the cache.
        only, whole: components of a pipeline to shard whatever they save, and to leave as they are; else denoisers
            are sharded, and encoders of which a rank saves at least 1 GB.

    Returns:
        The manifest of the set; of a pipeline with several sharded components, that of the first.

    Raises:
        UsageError, CheckpointError, PlanError, OutputError: before work starts where that is possible, with every fault
            found; nothing is left behind. Advice that does not stop the work comes as `ShardconvWarning`.
    """
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    options = Options(tp, variant, name, PlanChoice.of(plan, lean, "--"), self_contained, overwrite, dry_run, low_disk)
    options = replace(options, only=tuple(only), whole=tuple(whole))
    outcomes = convert_all(source, out, options, subfolder=subfolder, revision=revision)
    for text in [text for outcome in outcomes for text in outcome.warnings]:
        python_warnings.warn(text, ShardconvWarning, stacklevel=2)
    return outcomes[0].manifest


def convert_all(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Options,
    *,
    subfolder: str | None = None,
    revision: str | None = None,
    new_progress: NewProgress = lambda what, total: lambda nbytes: None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Outcome]:
    """As `convert`, with an outcome for each sharded component. All components are checked before one is written.

    `tell` is called with a sentence when the work of a killed conversion goes on, and when links bring in other files.
    """
    _check_request(source, out, options, subfolder)
    out, headers_only = Path(out), options.dry_run or options.low_disk
    located = locate(source, subfolder, revision, options.variant, headers_only)
    writer = _writer(source, located, subfolder, options)
    with ReadAhead(writer.cold if isinstance(writer, FromFiles) else (), 0 if options.dry_run else READ_AHEAD_NBYTES):
        jobs = prepare(located, subfolder, out, options)
    for job in jobs:
        check_siblings(job, job.manifest)
    rest: Rest = FolderRest(located.folder, ())
    if located.is_pipeline and subfolder is None:
        rest = rest_of(located, [job.component for job in jobs], headers_only)
    if remark := rest.remark():
        tell(remark)
    differing = rest.differing(out)
    if differing and not options.overwrite:
        raise OutputError(*differing)
    there = [_existing(job, options, new_progress) for job in jobs]
    if options.dry_run:
        download = located.snapshot.missing() if located.snapshot else None
        return [
            Outcome(job.component, job.folder, job.manifest, job.warnings, False, download, job.forecast)
            for job in jobs
        ]
    left = [job for job, known in zip(jobs, there, strict=True) if known is None]
    needed = sum(max(0, job.plan.layout.nbytes - leftover_nbytes(job.folder)) for job in left)
    issues = check_space(out, needed, rest.copied_nbytes(out) + writer.staged_nbytes(left))
    if issues:
        raise OutputError(*issues)
    outcomes: list[Outcome] = []
    sharded = [job.component for job in jobs] if rest.names else []
    steps = len(left) + bool(differing or any(not (out / name).exists() for name in rest.names))
    with standing(outcomes), unfinished(out, options.tp, sharded, steps):
        for job, known in zip(jobs, there, strict=True):
            if known is not None:
                clear_leftovers(job.folder)
            manifest = known or _execute(job, writer, options.overwrite, new_progress, tell)
            outcomes.append(Outcome(job.component, job.folder, manifest, job.warnings, known is not None))
        rest.bring(out, options.overwrite)
    return outcomes


def _check_request(
    source: str | os.PathLike[str], out: str | os.PathLike[str], options: Options, subfolder: str | None
) -> None:
    """Refuse what makes no sense whatever the source holds."""
    if type(options.tp) is not int or options.tp < 1:
        raise UsageError(f"--tp: expected a positive number of ranks, found {options.tp}")
    if Path(source).is_dir() and Path(source).resolve() in Path(out).resolve().parents:
        raise OutputError(f"{out}: lies inside the source {source}, which stays as it is; name another OUT")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UsageError(f"--dtype: expected one of {', '.join(DTYPES)}, found {options.dtype!r}")
    if subfolder is not None and (Path(subfolder).is_absolute() or ".." in Path(subfolder).parts):
        raise UsageError(f"--subfolder: expected a folder inside the source, found {subfolder!r}")


def _writer(source: str | os.PathLike[str], located: Located, subfolder: str | None, options: Options) -> Writer:
    if not options.low_disk:
        return FromFiles(cold_weights(located.folder, subfolder))
    if not located.snapshot:
        raise UsageError(f"--low-disk: of a Hub repo, {source} is here already; leave it out")
    return LowDisk(located.snapshot)


@contextmanager
def standing(outcomes: Sequence[Outcome]) -> Iterator[None]:
    """Have Ctrl-C tell which of the sets `outcomes` are complete by then."""
    try:
        yield
    except KeyboardInterrupt:
        written = [str(outcome.folder) for outcome in outcomes if not outcome.was_there]
        if not written:
            raise
        verb = "stand" if len(written) > 1 else "stands"
        raise Interrupted(f"{', '.join(written)} {verb} complete, what follows does not; run it again") from None


def _existing(job: Job, options: Options, new_progress: NewProgress) -> Manifest | None:
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
        if options.low_disk:  # nor does this; but a commit has one content
            if there.source.place == job.manifest.source.place and there.source.same_weights(job.manifest.source):
                return there
            raise OutputError(f"{job.folder}: holds a conversion of another commit; add --overwrite to replace it")
        progress = new_progress("compare", job.plan.read_nbytes)
        found_there = _with_source_digests(job, engine.digest_sources(job.plan, progress)).source
        if found_there.same_weights(there.source):
            return there
    why = ", ".join(different) if different else "the source's bytes"
    raise OutputError(f"{job.folder}: holds another conversion (differs in {why}); add --overwrite to replace it")


def _with_source_digests(job: Job, digests: Mapping[str, str]) -> Manifest:
    """The job's manifest with a digest for each source file: over its header's and its tensors', in file order."""
    records = []
    for file, record in zip(job.checkpoint.files, job.manifest.source.files, strict=True):
        digest = xxhash.xxh3_128(record.header_digest.encode())
        for entry in file.header.tensors:
            digest.update(digests.get(entry.name, "").encode())
        records.append(replace(record, digest=digest.hexdigest()))
    return replace(job.manifest, source=replace(job.manifest.source, files=tuple(records)))


def _execute(
    job: Job, writer: Writer, overwrite: bool, new_progress: NewProgress, tell: Callable[[str], None]
) -> Manifest:
    layout, total = job.plan.layout, job.plan.read_nbytes
    files = {file.name: file.nbytes for file in layout.files}
    key = conversion_key(job.manifest, writer.local_files(job))
    with PartialFolder(job.folder) as partial:
        done = finished(partial.path, key, files)
        there = sum(job.plan.sources[name].extent.nbytes for name in done)
        if done:
            tell(f"{job.folder}: resuming, {there:,} of {total:,} bytes are there already")
        progress = new_progress("convert", total)
        progress(there)
        outputs = partial.create(files, keep=bool(done))
        with Journal(partial.path, key, outputs) as journal:
            digests = writer.write(job, outputs, progress, done, journal)
        _check_tied(job, digests)
        manifest = _with_source_digests(job, {name: each.source for name, each in digests.items()})
        check_siblings(job, manifest)
        manifest = replace(manifest, digests={name: each.slices for name, each in digests.items()})
        manifest = write_headers(manifest, layout, outputs)
        partial.write_beside(CONFIG_NAME, job.checkpoint.config_bytes)
        partial.publish({MANIFEST_NAME: manifest.to_json().encode()}, overwrite)
    return manifest


def _check_tied(job: Job, digests: Mapping[str, TensorDigests]) -> None:
    """Two stored names of one parameter must hold the same bytes; only reading them can tell."""
    for group in job.tied:
        stored = [name for name in group if name in digests]
        if len({digests[name].source for name in stored}) > 1:
            raise CheckpointError(
                f"{stored[0]}: the model ties it to {stored[1]}, but the checkpoint stores different bytes for them; "
                "save the model again"
            )
