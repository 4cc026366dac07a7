"""JSON that others wrote: of bounded length, of bounded depth, no name twice where that would contradict."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

MAX_JSON_NBYTES = 100_000_000  # of one file; what the safetensors library allows a header
MAX_DEPTH = 64  # of lists and objects in one another


def would_wait(mode: int) -> bool:
    """Whether what has this `st_mode` is a pipe or a device, which may never end; a folder fails by itself."""
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def read_bounded(path: Path) -> bytes:
    """The bytes of a regular file. Raises `OSError`, and `ValueError` for a pipe, a device or an excessive length."""
    status = path.stat()
    if would_wait(status.st_mode):
        raise ValueError("a pipe or a device, not a file")
    if status.st_size > MAX_JSON_NBYTES:
        raise ValueError(f"{status.st_size:,} bytes, at most {MAX_JSON_NBYTES:,} are read")
    with path.open("rb") as file:
        return file.read(status.st_size)


def parse(text: bytes | str, *, unique: bool = True) -> Any:
    """Parsed JSON, UTF-8 when bytes. Raises `ValueError` for anything that is none, is nested too deep, has half a
    surrogate pair in it (which no file and no terminal takes), or names a key twice in one object; unless `unique` is
    false, when the last one counts as in Python's `json`."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates if unique else None)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if _is_deep(document):
        raise ValueError("nested too deep")
    if "\\u" in text:
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    return document


def _is_deep(document: object) -> bool:
    """Whether walking the document by recursion, as printing it does, could exhaust the stack."""
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for holder in level
            if isinstance(holder, (dict, list))
            for child in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return False
    return True


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice!r} stands twice")
    return result
