"""What the engine is asked for and what it answers: extents, plans, digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..format.header import TensorEntry
from ..format.layout import SetLayout, StoredTensor
from .transform import Transform


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of one tensor, or of one rank's slice of it, in a file."""

    path: Path
    offset: int  # absolute, bytes
    nbytes: int

    @classmethod
    def of(cls, path: Path, data_start: int, entry: TensorEntry) -> Extent:
        """The extent of `entry` in the file `path`, whose data part starts at the byte `data_start`."""
        return cls(path, data_start + entry.start, entry.nbytes)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a tensor of a set comes from, and what happens to its bytes on the way."""

    extent: Extent
    transform: Transform


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """Everything the engine needs to know: a layout, and where each tensor comes from."""

    layout: SetLayout
    sources: Mapping[str, TensorSource]  # by tensor name

    @property
    def read_nbytes(self) -> int:
        """Bytes of tensor data read from the source."""
        return sum(source.extent.nbytes for source in self.sources.values())


@dataclass(frozen=True, slots=True)
class TensorDigests:
    """xxh3-128, hex."""

    source: str  # of the source bytes
    slices: tuple[str, ...]  # of the stored bytes, one a rank; a single one when whole


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """From slices of one degree to those of another (1: whole tensors): where every slice stands, and where it goes."""

    tensors: Sequence[StoredTensor]
    slices: Mapping[str, Sequence[Extent]]  # one a source rank; a single one when whole
    starts: Mapping[str, Sequence[tuple[int, int]]]  # (index into outputs, absolute byte offset), as in `SetLayout`

    @property
    def read_nbytes(self) -> int:
        """Bytes of tensor data read."""
        return sum(extent.nbytes for extents in self.slices.values() for extent in extents)


@dataclass(frozen=True, slots=True)
class RouteDigests:
    """xxh3-128, hex, of one tensor's slices as they were read and as they were written."""

    read: tuple[str, ...]
    written: tuple[str, ...]
