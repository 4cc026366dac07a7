"""`shardconv inspect` as a library call: what a file, a set or an output folder is. Manifests and headers are read, no
weights; whether they are true is `verify`'s question."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SetError
from ..format.cut import Cut
from ..format.dtypes import nbytes_of
from ..format.header import FileHeader
from ..format.manifest import Manifest
from ..format.names import MANIFEST_NAME
from ..format.plan import REPLICATED
from ..format.sets import about_file, components_in, set_folders

SHARDED = "sharded"  # the style of a rank file's tensors where no manifest says more
STORED = "stored"  # that of a file which is not of a set


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor, as a set or a file has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # the full shape; in a file, of what it holds
    style: str  # REPLICATED whatever its module's style when it stays whole
    cut: Cut | None
    nbytes: int  # of that shape
    rank_nbytes: int  # of what one rank holds; in a file the same


@dataclass(frozen=True, slots=True)
class Inspected:
    """A set, or one file."""

    path: Path
    manifest: Manifest | None  # None: a file that has none beside it
    header: FileHeader | None  # None: a whole set
    about: Mapping[str, Any]  # what a file says of itself: rank, tp degree, conversion id; empty when it says nothing
    tensors: tuple[Held, ...]  # in source order; in a file by position
    missing: tuple[str, ...]  # files of the set that are not here

    @property
    def rank_nbytes(self) -> int:
        """Tensor bytes of one rank, or of the file."""
        return sum(tensor.rank_nbytes for tensor in self.tensors)

    def style_nbytes(self) -> dict[str, int]:
        """Style -> tensor bytes of one rank, or of the file; the most first, replicated last."""
        found: dict[str, int] = {}
        for tensor in self.tensors:
            found[tensor.style] = found.get(tensor.style, 0) + tensor.rank_nbytes
        return dict(sorted(found.items(), key=lambda item: (item[0] == REPLICATED, -item[1])))

    def largest(self, limit: int = 8) -> list[Held]:
        """The tensors that take most of a rank, or of the file."""
        return sorted(self.tensors, key=lambda tensor: -tensor.rank_nbytes)[:limit]


def inspect(path: str | os.PathLike[str]) -> list[Inspected]:
    """What stands at `path`: a safetensors file, a set, or all sets of a component or an output folder.

    Raises `SetError` or `CheckpointError` when it is none of these, or cannot be read.
    """
    path = Path(path)
    if path.is_file():
        return [_inspect_file(path)]
    if (path / MANIFEST_NAME).is_file():
        return [_inspect_set(path)]
    return [_inspect_set(folder) for name in components_in(path) for folder in set_folders(path / name)]


def _inspect_set(folder: Path) -> Inspected:
    manifest = Manifest.read(folder)
    tp = manifest.tp_degree
    tensors = tuple(
        Held(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            tensor.style if tensor.cut else REPLICATED,
            tensor.cut,
            nbytes_of(tensor.dtype, tensor.shape),
            tensor.slice_nbytes(tp),
        )
        for tensor in manifest.tensors
    )
    missing = tuple(file.name for file in manifest.files if not (folder / file.name).is_file())
    return Inspected(folder, manifest, None, {}, tensors, missing)


def _inspect_file(path: Path) -> Inspected:
    header = FileHeader.read(path)
    try:
        about = about_file(path, header)
    except SetError:
        about = {}
    beside = (path.parent / MANIFEST_NAME).is_file() and bool(about)
    manifest = Manifest.read(path.parent) if beside else None
    if manifest and manifest.conversion_id != about.get("conversion_id"):
        manifest = None
    known = {tensor.name: tensor for tensor in manifest.tensors} if manifest else {}
    unknown = STORED if not about else REPLICATED if about.get("rank") is None else SHARDED
    tensors = []
    for entry in header.tensors:
        stored = known.get(entry.name)
        cut = stored.cut if stored else None
        style = (stored.style if cut else REPLICATED) if stored else unknown
        tensors.append(Held(entry.name, entry.dtype, entry.shape, style, cut, entry.nbytes, entry.nbytes))
    return Inspected(path, manifest, header, about, tuple(tensors), ())
