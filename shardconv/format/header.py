"""The safetensors header: read with suspicion, written by ourselves.

A safetensors file is an 8-byte little-endian length N, N bytes of JSON, then tensor data. The format is described at
https://github.com/huggingface/safetensors#format. We write headers ourselves because the library orders metadata at
random and creates files with mode 0600, and because our tensor data starts on a 4096-byte boundary.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..errors import CheckpointError
from ..system.jsonfile import parse, would_wait
from .dtypes import DTYPE_BITS, nbytes_of

DATA_ALIGNMENT = 4096  # bytes; tensor data of our files starts on a multiple of this
MAX_HEADER_NBYTES = 100_000_000  # the limit of the safetensors library itself
SNIFF_NBYTES = 256  # bytes looked at to say what a file is when it is not a safetensors file


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str  # a key of DTYPE_BITS
    shape: tuple[int, ...]
    start: int  # byte offset from the start of the data part
    nbytes: int

    @property
    def end(self) -> int:
        """Exclusive end, bytes from the start of the data part."""
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a safetensors file declares about itself, checked against its length."""

    tensors: tuple[TensorEntry, ...]  # by position in the file
    metadata: Mapping[str, str]
    data_start: int  # absolute byte offset of the data part
    file_nbytes: int
    digest: str  # xxh3-128 of the bytes before the data part, hex

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FileHeader:
        """Read and check the header of `path`; no tensor data is touched.

        Raises `CheckpointError` when the file is not a whole, well-formed safetensors file, naming what it is instead
        (a Git LFS pointer, a web page, an empty or a shortened file) and what to do.
        """
        path = Path(path)
        status = path.stat()
        if would_wait(status.st_mode):
            raise CheckpointError(f"{path.name}: a pipe or a device, not a file; fetch it again")
        file_nbytes = status.st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_NBYTES, file_nbytes - 8):
                raise CheckpointError(_not_safetensors(path, prefix + file.read(SNIFF_NBYTES), length, file_nbytes))
            raw = file.read(length)
        try:
            tensors, metadata = _parse(parse(raw))
        except (_Malformed, ValueError) as error:
            raise _malformed(path, error) from None
        declared = 8 + length + (tensors[-1].end if tensors else 0)
        if declared != file_nbytes:
            what = "the copy is incomplete" if declared > file_nbytes else "something was added to it"
            raise CheckpointError(
                f"{path.name}: header declares {declared:,} bytes, file has {file_nbytes:,}; {what}, fetch it again"
            )
        return cls(tensors, metadata, 8 + length, file_nbytes, xxhash.xxh3_128_hexdigest(prefix + raw))


class _Malformed(Exception):
    """What breaks the format; completes the sentence of `_malformed`."""


def _parse(document: object) -> tuple[tuple[TensorEntry, ...], dict[str, str]]:
    if not isinstance(document, dict):
        raise _Malformed("its header is not a JSON object")
    metadata = document.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _Malformed("__metadata__ is not a map of strings")
    entries = sorted((_entry(name, value) for name, value in document.items()), key=lambda e: (e.start, e.end))
    _check_layout(entries)
    return tuple(entries), metadata


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_astronomic(shape: Sequence[int]) -> bool:
    """Whether the sizes other than 0 multiply to 2**63 or more; stops there, as a hostile shape could take hours."""
    product = 1
    for num in shape:
        product *= max(num, 1)
        if product >= 2**63:
            return True
    return False


def _entry(name: str, value: object) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _Malformed(f"the entry of {name!r} does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _Malformed(f"{name!r} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise _Malformed(f"{name!r} has the shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise _Malformed(f"{name!r} has the data_offsets {offsets!r}")
    start, end = offsets
    if is_astronomic(shape):
        raise _Malformed(f"{name!r} has a shape of more elements than there can be")
    if math.prod(shape) * DTYPE_BITS[dtype] % 8:
        raise _Malformed(f"{name!r}, {dtype} {shape}, does not fill its last byte")
    expected = nbytes_of(dtype, shape)
    if end - start != expected:
        raise _Malformed(f"{name!r}, {dtype} {shape}, takes {expected:,} bytes, its data_offsets span {end - start:,}")
    return TensorEntry(name, dtype, tuple(shape), start, expected)


def _check_layout(tensors: Iterable[TensorEntry]) -> None:
    position = 0
    for entry in tensors:
        if entry.start != position:
            what = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
            raise _Malformed(f"{entry.name!r} {what}: starts at byte {entry.start:,}, expected {position:,}")
        position = entry.end


def _malformed(path: Path, why: object) -> CheckpointError:
    return CheckpointError(f"{path.name}: not a well-formed safetensors file ({why}); fetch or write it again")


def _not_safetensors(path: Path, head: bytes, length: int, file_nbytes: int) -> str:
    start = head.lstrip()[:64].lower()
    if not head:
        return f"{path.name}: the file is empty; fetch it again"
    if start.startswith(b"version https://git-lfs"):
        return f"{path.name}: a Git LFS pointer, not the weights; run: git lfs pull"
    if start.startswith((b"<!doctype", b"<html")):
        return f"{path.name}: a web page, not the weights; the download went wrong, fetch it again"
    if start.startswith((b"pk\x03\x04", b"\x80\x02", b"\x80\x04")):
        return f"{path.name}: a pickled PyTorch file under a .safetensors name; save it with safe_serialization=True"
    if length > MAX_HEADER_NBYTES and head[8:9] == b"{":
        return (
            f"{path.name}: its header takes {length:,} bytes, readers of the format take at most {MAX_HEADER_NBYTES:,}"
            "; write its tensors into several files"
        )
    if 8 < length <= MAX_HEADER_NBYTES and head[8:9] == b"{":
        return (
            f"{path.name}: header declares {length:,} bytes for itself, the file has {file_nbytes:,}; "
            "the copy is incomplete, fetch it again"
        )
    return f"{path.name}: not a safetensors file (its first bytes are {head[:8]!r}); fetch or write it again"


def encode_header(tensors: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data part: length, compact JSON in the given order, spaces up to DATA_ALIGNMENT.

    `tensors` must follow each other without holes, from offset 0. The same input gives the same bytes.
    """
    document: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    for entry in tensors:
        document[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.start, entry.end]}
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    padding = -(8 + len(raw)) % DATA_ALIGNMENT
    return (len(raw) + padding).to_bytes(8, "little") + raw + b" " * padding
