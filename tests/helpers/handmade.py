"""safetensors files written byte by byte, with nothing of ours and nothing of the library, for tests of readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of `header` (bytes, JSON text or what json.dumps takes) and `data`; `length` may lie about the header."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype: str, shape: Sequence[object], start: object, end: object) -> dict[str, object]:
    """The value a header holds for one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def write_source(path: Path, tensors: Sequence[tuple[str, str, Sequence[int], bytes]]) -> None:
    """Write (name, dtype, shape, data) one after the other into `path`."""
    header, data = {}, b""
    for name, dtype, shape, raw in tensors:
        header[name] = entry(dtype, shape, len(data), len(data) + len(raw))
        data += raw
    path.write_bytes(raw_file(header, data))
