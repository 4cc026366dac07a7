"""`convert --low-disk`: weight files of a repo come to this disk one at a time and go when they are used.

The files stand in `.tp4.source` beside the set under construction, whose lock is held; a kill leaves at most one there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..engine import run as engine
from ..engine.records import ConvertPlan, TensorDigests, TensorSource
from ..errors import OutputError
from ..remote.hub_cache import digest_of
from ..remote.snapshot import Snapshot
from ..system.progress import Progress
from ..target.journal import Journal
from ..target.leftovers import claimed
from .prepare import Job

_STAGING = ".shardconv.source-"  # what the name of a folder for downloads begins with


def run(
    job: Job,
    snapshot: Snapshot,
    outputs: Sequence[int],
    progress: Progress,
    done: Mapping[str, TensorDigests],
    journal: Journal,
) -> Mapping[str, TensorDigests]:
    """As `engine.run`, of a job that was planned from headers. Files whose tensors are all `done` are not downloaded.

    The tensors of a file are durable before it goes. Raises `HubError` as well.
    """
    digests = dict(done)
    with _staging(job.folder.with_name(f".{job.folder.name}.source")) as staging:
        for file in job.checkpoint.files:
            sources = job.plan.sources
            mine = [tensor for tensor in job.plan.layout.tensors if sources[tensor.name].extent.path == file.path]
            left = tuple(tensor for tensor in mine if tensor.name not in digests)
            if not left:
                continue
            path = snapshot.repo.download(snapshot.listing, f"{job.component}/{file.name}".lstrip("/"), staging)
            moved = {tensor.name: _at(path, sources[tensor.name]) for tensor in left}
            part = ConvertPlan(replace(job.plan.layout, tensors=left), moved)
            digests |= engine.run(part, outputs, progress, (path,), add=journal.add)
            journal.commit()
            path.unlink()
    return digests


def _at(path: Path, source: TensorSource) -> TensorSource:
    """`source` in another place."""
    return replace(source, extent=replace(source.extent, path=path))


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A folder for downloads; what a killed process finished stays, what it began goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.rglob("*.incomplete"):
        path.unlink()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def differing(snapshot: Snapshot, out: Path, names: Sequence[str]) -> list[str]:
    """Issues that forbid bringing the files `names` of the repo into `out`: a different file stands there."""
    return [
        f"{out / name}: differs from that of {snapshot.repo.name}; move it away or name another OUT, or add --overwrite"
        for name in names
        if (out / name).exists() and not _is_there(snapshot, out, name)
    ]


def _is_there(snapshot: Snapshot, out: Path, name: str) -> bool:
    """As far as can be told: offline by the length alone."""
    known = snapshot.listing.files[name]
    is_as_long = (out / name).stat().st_size == known.nbytes
    return is_as_long and (not known.digest or digest_of(out / name, known.digest) == known.digest)


def bring_rest(snapshot: Snapshot, out: Path, names: Sequence[str], overwrite: bool = False) -> None:
    """Download files of the repo into `out`, where they are not yet; with `overwrite` also where others stand."""
    with _own_staging(out) as staging:
        for name in names:
            target = out / name
            if target.exists() and not (overwrite and not _is_there(snapshot, out, name)):
                continue
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(snapshot.repo.download(snapshot.listing, name, staging), target)
            except FileNotFoundError as error:
                raise OutputError(f"{target}: cannot be written ({error.strerror}); choose another OUT") from None


@contextmanager
def _own_staging(out: Path) -> Iterator[Path]:
    """A folder in `out` for the downloads of this process alone; those that killed ones left go."""
    for folder in out.glob(f"{_STAGING}*"):
        with claimed(folder) as is_ours:
            if is_ours:
                shutil.rmtree(folder, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=out))
    try:
        with claimed(staging):
            yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
