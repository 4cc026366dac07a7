"""From a path and a number of ranks to the set that fits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shardconv.errors import SetError
from shardconv.format.names import MANIFEST_NAME, WEIGHTS_STEMS, degree_of, is_hidden, set_folder_name
from shardconv.format.sets import sets_in


def find_set(path: str | os.PathLike[str], subfolder: str | None, size: int) -> Path:
    """The folder of the set for `size` ranks: the one of that tp degree, else the smallest multiple of it.

    `path` is a component folder, an output folder with `subfolder`, or the set's own folder. Raises `SetError` that
    says what stands there instead and what to run.
    """
    component = Path(path) / subfolder if subfolder else Path(path)
    if (component / MANIFEST_NAME).is_file():
        return component
    if not component.is_dir():
        raise SetError(f"{component}: no such folder; give the folder that shardconv convert wrote")
    sets = sets_in(component)
    fitting = [degree for degree in sets if degree % size == 0]
    if fitting:
        return sets[min(fitting)]
    if sets:
        raise SetError(no_set_for(size, component, sets))
    for folder in (component, component / set_folder_name(size)):
        if degree_of(folder.absolute().name) and folder.is_dir():
            raise SetError(f"{folder}: no {MANIFEST_NAME}, so not a complete set; fetch or convert it again")
    if (component / f".{set_folder_name(size)}.partial").is_dir():
        raise SetError(f"{component}: the conversion for tp degree {size} did not finish; run shardconv convert again")
    visible = [child for child in sorted(component.iterdir()) if child.is_dir() and not is_hidden(child.name)]
    inner = [child.name for child in visible if sets_in(child)]
    if inner:
        raise SetError(f"{component}: the set is in {', '.join(inner)}; add subfolder={inner[0]!r}")
    if any(child.name.startswith(WEIGHTS_STEMS) for child in component.iterdir()):
        raise SetError(
            f"{component}: an ordinary checkpoint, not converted; run: shardconv convert --tp {size} {component} OUT"
        )
    raise SetError(f"{component}: no converted set in it; run: shardconv convert --tp {size} SOURCE {path}")


def no_set_for(size: int, where: Path, sets: Mapping[int, Path]) -> str:
    """The sentence for a group of `size` ranks that none of `sets` (tp degree -> folder), found at `where`, fits."""
    degrees = " and ".join(map(str, sets))
    folder = sets[max(sets)]
    return (
        f"{where}: converted for tp degree {degrees}, this group has {size} ranks; "
        f"run: shardconv reshard --tp {size} {folder} {folder.parent}"
    )
