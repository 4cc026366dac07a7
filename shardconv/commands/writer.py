"""How the bytes of a set get into its files: from files that are here, or from a repo's, one at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ..engine import run as engine
from ..engine.records import ConvertPlan, TensorDigests, TensorSource
from ..remote.snapshot import Snapshot
from ..system.progress import Progress
from ..target.journal import Journal
from .prepare import Job


class Writer(Protocol):
    """Carries out a job's plan."""

    def staged_nbytes(self, jobs: Sequence[Job]) -> int:
        """Bytes of a source that stand on the disk of OUT for a while."""

    def local_files(self, job: Job) -> list[Path]:
        """The weight files of the job that are on this disk, and may change there."""

    def write(
        self, job: Job, outputs: Sequence[int], progress: Progress, done: Mapping[str, TensorDigests], journal: Journal
    ) -> Mapping[str, TensorDigests]:
        """As `engine.run`; what is written is told to `journal`."""


@dataclass(frozen=True, slots=True)
class FromFiles:
    """Weight files on this disk."""

    cold: Sequence[Path]  # that need not stay in memory once they are used

    def staged_nbytes(self, jobs: Sequence[Job]) -> int:
        """None."""
        return 0

    def local_files(self, job: Job) -> list[Path]:
        """See `Writer`."""
        return [file.path for file in job.checkpoint.files]

    def write(
        self, job: Job, outputs: Sequence[int], progress: Progress, done: Mapping[str, TensorDigests], journal: Journal
    ) -> Mapping[str, TensorDigests]:
        """See `Writer`."""
        return engine.run(job.plan, outputs, progress, self.cold, done, journal.add)


@dataclass(frozen=True, slots=True)
class LowDisk:
    """`convert --low-disk`: weight files of a repo come to this disk one at a time and go when they are used.

    The files stand in `.tp4.source` beside the set under construction, whose lock is held; a kill leaves at most one.
    """

    snapshot: Snapshot

    def staged_nbytes(self, jobs: Sequence[Job]) -> int:
        """The longest file."""
        return max((file.header.file_nbytes for job in jobs for file in job.checkpoint.files), default=0)

    def local_files(self, job: Job) -> list[Path]:
        """None: a commit's files do not change."""
        return []

    def write(
        self, job: Job, outputs: Sequence[int], progress: Progress, done: Mapping[str, TensorDigests], journal: Journal
    ) -> Mapping[str, TensorDigests]:
        """See `Writer`; of a job that was planned from headers. Files whose tensors are all `done` are not downloaded.

        The tensors of a file are durable before it goes. Raises `HubError` as well.
        """
        digests, repo, sources = dict(done), self.snapshot.repo, job.plan.sources
        with _staging(job.folder.with_name(f".{job.folder.name}.source")) as staging:
            for file in job.checkpoint.files:
                mine = [tensor for tensor in job.plan.layout.tensors if sources[tensor.name].extent.path == file.path]
                left = tuple(tensor for tensor in mine if tensor.name not in digests)
                if not left:
                    continue
                path = repo.download(self.snapshot.listing, f"{job.component}/{file.name}".lstrip("/"), staging)
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
