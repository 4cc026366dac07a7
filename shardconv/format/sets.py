"""The files of a converted set, checked against its manifest: what loading, merging and verifying start from."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ..errors import SetError, ShardconvError
from ..system.jsonfile import parse
from ..system.links import strange_link
from .header import FileHeader
from .layout import FORMAT_VERSION, FileLayout, file_header
from .manifest import FileRecord, Manifest
from .names import CONFIG_NAME, MANIFEST_NAME, degree_of, is_hidden


@dataclass(frozen=True, slots=True)
class SetFile:
    """One file of a set, its header checked."""

    path: Path
    rank: int | None  # None: the file of replicated tensors
    header: FileHeader


def set_folders(component: Path) -> list[Path]:
    """The `tpN` folders of a component folder, complete or not."""
    found = component.iterdir() if component.is_dir() else ()
    return sorted(child for child in found if degree_of(child.name) and child.is_dir())


def components_in(path: Path) -> list[str]:
    """Names of the folders in `path` that hold sets, complete or not; "" alone when `path` is a set or a component
    folder itself.

    Raises `SetError` when there is no set.
    """
    if (path / MANIFEST_NAME).is_file() or set_folders(path):
        return [""]
    children = [child for child in path.iterdir() if not is_hidden(child.name)] if path.is_dir() else []
    inner = sorted(child.name for child in children if set_folders(child))
    if not inner:
        any_set(path)  # says what stands there instead
    return inner


def any_set(path: Path) -> Path:
    """The folder of a set: `path` itself, or the lowest degree in the component folder `path`. Raises `SetError`."""
    if (path / MANIFEST_NAME).is_file():
        return path
    sets = sets_in(path)
    if not path.is_dir():
        raise SetError(f"{path}: no such folder; give the folder that shardconv convert wrote")
    for folder in set_folders(path) if not sets else ():
        raise SetError(f"{folder}: no {MANIFEST_NAME}, so not a complete set; fetch or convert it again")
    if not sets:
        children = [child for child in path.iterdir() if child.is_dir() and not is_hidden(child.name)]
        inner = sorted(child.name for child in children if sets_in(child))
        where = f"it is in {', '.join(inner)}; give {path / inner[0]}" if inner else "give a folder that convert wrote"
        raise SetError(f"{path}: no converted set in it; {where}")
    casts = {degree: Manifest.read(folder).cast_to or "as stored" for degree, folder in sets.items()}
    if len(set(casts.values())) > 1:
        listed = ", ".join(f"tp{degree} ({cast})" for degree, cast in casts.items())
        raise SetError(f"{path}: several sets of different dtypes, {listed}; name one of these folders")
    return next(iter(sets.values()))


def component_of(folder: Path) -> Path:
    """The component folder of a set, with the config that goes with it; of a set that is a link from elsewhere, the one
    in which it really stands."""
    beside, real = folder.absolute().parent, Path(os.path.realpath(folder)).parent
    return real if not (beside / CONFIG_NAME).exists() and (real / CONFIG_NAME).exists() else beside


def open_files(folder: Path, manifest: Manifest, ranks: Iterable[int]) -> tuple[SetFile, ...]:
    """The files that `ranks` need, with the replicated one; headers only.

    Raises `SetError` with every fault: a missing or shortened file, one of another conversion, degree or rank, a header
    that is not the one the manifest describes.
    """
    wanted = {None, *ranks}
    files, issues = read_files(folder, manifest, {record.name for record in manifest.files if record.rank in wanted})
    if issues:
        raise SetError(*issues)
    return files


def read_files(folder: Path, manifest: Manifest, names: Collection[str]) -> tuple[tuple[SetFile, ...], list[str]]:
    """Of the files `names` of a set, those whose headers are right, and every fault of the others."""
    files: list[SetFile] = []
    issues: list[str] = []
    for layout, record in zip(manifest.layout().files, manifest.files, strict=True):
        if layout.name not in names:
            continue
        path = folder / layout.name
        try:
            files.append(SetFile(path, layout.rank, _read_header(path, layout, record, manifest)))
        except ShardconvError as error:
            issues.extend(error.issues)
        except OSError as error:
            issues.append(f"{path}: cannot be read ({error.strerror}); fetch or convert the set again")
    return tuple(files), issues


def _read_header(path: Path, layout: FileLayout, record: FileRecord, manifest: Manifest) -> FileHeader:
    outside = strange_link(path)
    if outside:
        raise SetError(f"{path.name}: a link that leads out of its folder, to {outside}; put the file itself there")
    header = FileHeader.read(path)
    about = about_file(path, header)
    expectations = {
        "format_version": FORMAT_VERSION,
        "tp_degree": manifest.tp_degree,
        "rank": layout.rank,
        "conversion_id": manifest.conversion_id,
    }
    for key, expected in expectations.items():
        if about.get(key) != expected:
            raise SetError(
                f"{path.name}: expected {key} {expected}, found {about.get(key)}; the file is of another conversion or "
                "rank, fetch or convert the set again"
            )
    described = xxhash.xxh3_128_hexdigest(file_header(layout, manifest.conversion_id, manifest.tp_degree))
    if not header.digest == record.header_digest == described:
        raise SetError(f"{path.name}: its header is not the one the manifest describes; fetch or convert the set again")
    return header


def about_file(path: Path, header: FileHeader) -> dict[str, Any]:
    """What a file of a set says of itself. Raises `SetError` when it says nothing."""
    try:
        about = parse(header.metadata["shardconv"])
    except (KeyError, ValueError):
        about = None
    if not isinstance(about, dict):
        raise SetError(f"{path.name}: not a file of a converted set; fetch or convert the set again")
    return about


def sets_in(component: Path) -> dict[int, Path]:
    """tp degree -> folder of every complete set in a component folder."""
    found = {}
    for entry in os.scandir(component) if component.is_dir() else ():
        degree = degree_of(entry.name)
        if degree and (component / entry.name / MANIFEST_NAME).is_file():
            found[degree] = component / entry.name
    return dict(sorted(found.items()))
