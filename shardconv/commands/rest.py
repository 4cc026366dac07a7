"""What a conversion of a pipeline brings along unchanged: the other components, licence, card and index."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import OutputError
from ..format.pipeline import rest_of_pipeline
from ..remote.hub_cache import digest_of
from ..remote.snapshot import Snapshot
from ..source.locate import Located
from ..system.links import followed
from ..target.checks import check_links, copied_nbytes
from ..target.leftovers import claimed
from ..target.links import link_files

_STAGING = ".shardconv.source-"  # what the name of a folder for downloads begins with


class Rest(Protocol):
    """Files, by their names in the pipeline; none when a component alone is converted."""

    @property
    def names(self) -> Sequence[str]:
        """In the order in which they are brought, `model_index.json` last."""

    def remark(self) -> str | None:
        """What to say before they are brought."""

    def differing(self, out: Path) -> list[str]:
        """Issues that forbid bringing them into `out` without `--overwrite`: others stand there."""

    def copied_nbytes(self, out: Path) -> int:
        """Bytes on the disk of `out` that they will take."""

    def bring(self, out: Path, overwrite: bool) -> None:
        """Put them into `out`, where they are not yet; with `overwrite` also where others stand."""


@dataclass(frozen=True, slots=True)
class FolderRest:
    """Hard links to files on this disk, or copies."""

    folder: Path
    names: Sequence[str]

    def remark(self) -> str | None:
        """Which links bring in files from elsewhere."""
        return followed(self.names, self.folder)

    def differing(self, out: Path) -> list[str]:
        """See `Rest`."""
        return check_links(self.folder, out, self.names)

    def copied_nbytes(self, out: Path) -> int:
        """See `Rest`."""
        return copied_nbytes(self.folder, out, self.names)

    def bring(self, out: Path, overwrite: bool) -> None:
        """See `Rest`."""
        link_files(self.folder, out, self.names, overwrite)


@dataclass(frozen=True, slots=True)
class RemoteRest:
    """Files of a repo that are not here: each is downloaded into its place."""

    snapshot: Snapshot
    names: Sequence[str]

    def remark(self) -> str | None:
        """Nothing: a repo's links are not followed."""
        return None

    def differing(self, out: Path) -> list[str]:
        """See `Rest`."""
        return [
            f"{out / name}: differs from that of {self.snapshot.repo.name}; move it away or name another OUT, or add "
            "--overwrite"
            for name in self.names
            if (out / name).exists() and not self._is_there(out, name)
        ]

    def copied_nbytes(self, out: Path) -> int:
        """See `Rest`."""
        return sum(self.snapshot.listing.files[name].nbytes for name in self.names if not (out / name).exists())

    def bring(self, out: Path, overwrite: bool) -> None:
        """See `Rest`. Raises `HubError` as well."""
        with _own_staging(out) as staging:
            for name in self.names:
                target = out / name
                if target.exists() and not (overwrite and not self._is_there(out, name)):
                    continue
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(self.snapshot.repo.download(self.snapshot.listing, name, staging), target)
                except FileNotFoundError as error:
                    raise OutputError(f"{target}: cannot be written ({error.strerror}); choose another OUT") from None

    def _is_there(self, out: Path, name: str) -> bool:
        """As far as can be told: offline by the length alone."""
        known = self.snapshot.listing.files[name]
        is_as_long = (out / name).stat().st_size == known.nbytes
        return is_as_long and (not known.digest or digest_of(out / name, known.digest) == known.digest)


def rest_of(located: Located, sharded: Sequence[str], headers_only: bool) -> Rest:
    """What a pipeline's other files are, when all of it is converted: `sharded` are the components that become sets."""
    names = rest_of_pipeline(located.folder, sharded)
    if located.snapshot and headers_only:
        return RemoteRest(located.snapshot, located.snapshot.rest(sharded))
    return FolderRest(located.folder, names)


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
