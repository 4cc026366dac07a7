"""What a converted set looks like on disk: every file, every tensor's place in it, before a byte is written.

Pure. The same layout tells the converter what to write and the loader what to expect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import CheckpointError
from .cut import Cut, Rows, rows_of
from .dtypes import CAST_FLOATS, DTYPE_BITS, nbytes_of
from .header import TensorEntry, encode_header
from .names import REPLICATED_FILE, rank_file_name
from .plan import REPLICATED, Style

FORMAT_VERSION = 1
TENSOR_ALIGNMENT = 256  # bytes; as many tensors as possible start on a multiple of this


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the model as a set holds it."""

    name: str
    dtype: str  # as stored, a name of the safetensors format
    shape: tuple[int, ...]  # the full shape
    style: str  # a `Style` value or `REPLICATED`
    cut: Cut | None  # None: whole on every rank

    def slice_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of what one file holds."""
        return self.cut.local_shape(self.shape, tp) if self.cut else self.shape

    def slice_nbytes(self, tp: int) -> int:
        """Bytes of what one file holds."""
        return nbytes_of(self.dtype, self.slice_shape(tp))

    def rows(self) -> Rows | None:
        """Memory order under the cut, in elements; None when whole."""
        return rows_of(self.shape, self.cut) if self.cut else None


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file of the set."""

    name: str
    rank: int | None  # None: the file of replicated tensors
    tensors: tuple[TensorEntry, ...]  # by position
    header_nbytes: int  # everything before the data part

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return self.header_nbytes + (self.tensors[-1].end if self.tensors else 0)


@dataclass(frozen=True, slots=True)
class SetLayout:
    """The files of one set and where every slice stands."""

    tp: int
    self_contained: bool
    tensors: tuple[StoredTensor, ...]  # in the order in which every file takes them
    files: tuple[FileLayout, ...]
    starts: Mapping[str, Sequence[tuple[int, int]]]  # tensor -> (index into files, absolute byte offset) of each slice

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.nbytes for file in self.files)


def file_header(file: FileLayout, conversion_id: str, tp: int) -> bytes:
    """Everything before the data part of `file`."""
    return encode_header(file.tensors, _metadata(conversion_id, file.rank, tp))


def _metadata(conversion_id: str, rank: int | None, tp: int) -> dict[str, str]:
    """`format` for other readers, and what a lone file must say about itself."""
    about = {"conversion_id": conversion_id, "format_version": FORMAT_VERSION, "rank": rank, "tp_degree": tp}
    return {"format": "pt", "shardconv": json.dumps(about, sort_keys=True, separators=(",", ":"))}


def stored_tensors(
    entries: Iterable[TensorEntry],
    cuts: Mapping[str, tuple[Style | str, Cut | None]],
    cast_to: str | None,
    keep_fp32: Iterable[str],
) -> list[StoredTensor]:
    """The tensors of the set, in the order of the source's `entries`. A cast touches `CAST_FLOATS` only, names
    of `keep_fp32` go to F32.

    Raises `CheckpointError` for tensors to be cut whose elements do not fill bytes.
    """
    kept = frozenset(keep_fp32)
    result, issues = [], []
    for entry in entries:
        name, dtype = entry.name, entry.dtype
        if cast_to and dtype in CAST_FLOATS:
            dtype = "F32" if name in kept else cast_to
        style, cut = cuts.get(name, (REPLICATED, None))
        if cut is not None and DTYPE_BITS[dtype] % 8:
            issues.append(
                f"{name}: stored as {dtype}, several elements in a byte, which cannot be cut; convert an unquantized "
                "checkpoint"
            )
        result.append(StoredTensor(name, dtype, entry.shape, str(getattr(style, "value", style)), cut))
    if issues:
        raise CheckpointError(*issues)
    return result


def plan_layout(tensors: Sequence[StoredTensor], tp: int, self_contained: bool) -> SetLayout:
    """Give every slice its file and offset.

    Within a file: first tensors whose slice is a multiple of 256 bytes, then by item size, descending, each in source
    order. The key is the same for every rank, so going through the tensors in that order only ever appends.
    """
    ordered = sorted(tensors, key=lambda tensor: _order(tensor, tp))
    local = [tensor for tensor in ordered if tensor.cut is not None or self_contained]
    shared = [tensor for tensor in ordered if tensor.cut is None and not self_contained]
    files = [_file_layout(rank_file_name(rank, tp), rank, local, tp) for rank in range(tp)]
    if shared:
        files.append(_file_layout(REPLICATED_FILE, None, shared, tp))
    starts: dict[str, list[tuple[int, int]]] = {tensor.name: [] for tensor in ordered}
    for index, file in enumerate(files):
        for entry in file.tensors:
            starts[entry.name].append((index, file.header_nbytes + entry.start))
    return SetLayout(tp, self_contained, tuple(ordered), tuple(files), starts)


def _order(tensor: StoredTensor, tp: int) -> tuple[bool, int]:
    if tensor.slice_nbytes(tp) % TENSOR_ALIGNMENT == 0:
        return False, 0
    return True, -DTYPE_BITS[tensor.dtype]


def _file_layout(name: str, rank: int | None, tensors: Sequence[StoredTensor], tp: int) -> FileLayout:
    entries = []
    position = 0
    for tensor in tensors:
        nbytes = tensor.slice_nbytes(tp)
        entries.append(TensorEntry(tensor.name, tensor.dtype, tensor.slice_shape(tp), position, nbytes))
        position += nbytes
    # A conversion id has one length, so the header's length is known before the id is.
    return FileLayout(name, rank, tuple(entries), len(encode_header(entries, _metadata("0" * 32, rank, tp))))
