"""Which tensors of a folder under construction are durable, so that a killed conversion goes on where it was.

`progress.jsonl` stands beside the files it speaks of and is gone before they get their final name. Its first line names
the conversion; each other line is one tensor, written only after the tensor's bytes were synced. After a kill or a
power loss nothing but these lines is trusted.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import xxhash

from ..engine.records import TensorDigests
from ..format.manifest import Manifest
from ..format.names import JOURNAL_NAME
from ..system.linux import sync_folder

INTERVAL_S = 5.0  # between two syncs; a kill costs the work of about that long


def conversion_key(manifest: Manifest, sources: Iterable[Path]) -> str:
    """xxh3-128, hex, over everything that decides what is written: the manifest before the conversion (settings, plan,
    layout, names, lengths and headers of the sources, versions) and when each source file was changed.

    Source bytes of tensors that are done are not read again: a change that alters neither length, header, mtime nor
    ctime (which a program cannot set) goes unnoticed.
    """
    digest = xxhash.xxh3_128(manifest.to_json().encode())
    for stat in map(os.stat, sources):
        digest.update(f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\n".encode())
    return digest.hexdigest()


def finished(folder: Path, key: str, files: Mapping[str, int]) -> dict[str, TensorDigests]:
    """The tensors of conversion `key` whose bytes are durable in `folder`, by name.

    Empty when the journal is another conversion's or when one of `files` (name -> bytes) is not there in full length.
    """
    try:
        first, *lines = (folder / JOURNAL_NAME).read_bytes().split(b"\n")
        if any((folder / name).lstat().st_size != nbytes for name, nbytes in files.items()):
            return {}
    except OSError:
        return {}
    return dict(filter(None, (_parse(key, line) for line in lines))) if first == _key_line(key) else {}


def _key_line(key: str) -> bytes:
    return json.dumps({"conversion": key}).encode()


def _line(key: str, name: str, digests: TensorDigests) -> bytes:
    """The check at its end is over the key too: what a power loss puts into a file may be part of an old journal."""
    record = {"name": name, "source": digests.source, "slices": digests.slices}
    check = xxhash.xxh3_64_hexdigest((key + json.dumps(record)).encode())
    return json.dumps(record | {"check": check}, separators=(",", ":")).encode()


def _parse(key: str, line: bytes) -> tuple[str, TensorDigests] | None:
    """None for a line that is torn."""
    try:
        record = json.loads(line)
        name, digests = record["name"], TensorDigests(record["source"], tuple(record["slices"]))
        return (name, digests) if _line(key, name, digests) == line else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class Journal:
    """Writes the journal of a running conversion, in a thread of its own. A context manager."""

    def __init__(self, folder: Path, key: str, outputs: Sequence[int]) -> None:
        """`outputs`: descriptors of all files in `folder` that hold tensors. A journal that is there is continued."""
        self._key = key
        self._outputs = outputs
        self._folder = folder
        self._file = open(folder / JOURNAL_NAME, "ab")  # noqa: SIM115 - closed by __exit__
        self._file.write(b"\n" if self._file.tell() else _key_line(key) + b"\n")  # the last line may be torn
        self._pending: list[bytes] = []
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # of whoever commits
        self._stop = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="shardconv-journal")

    def add(self, name: str, digests: TensorDigests) -> None:
        """A tensor is written. Raises the `OSError` that the disk gave when earlier ones were synced."""
        if self._error:
            raise self._error
        with self._lock:
            self._pending.append(_line(self._key, name, digests) + b"\n")

    def _run(self) -> None:
        try:
            while not self._stop.wait(INTERVAL_S):
                self.commit()
        except OSError as error:  # the system reports a failed write-back once, so it must not be lost
            self._error = error

    def commit(self) -> None:
        """Make the tensors added so far durable, then say so."""
        with self._turn:
            self._commit()

    def _commit(self) -> None:
        with self._lock:
            lines, self._pending = self._pending, []
        if not lines:
            return
        for fd in self._outputs:
            os.fdatasync(fd)
        sync_folder(self._folder)
        self._file.writelines(lines)
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._stop.set()
        self._thread.join()
        self._file.close()
        if self._error and kind is None:
            raise self._error
