"""`model_index.json`, and what belongs to a pipeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError
from ..system.jsonfile import parse, read_bounded
from ..system.links import files_in, link_issues
from .names import MODEL_INDEX, is_hidden

CARD_STEM = "README"  # what the name of a model card begins with


def pipeline_components(folder: Path) -> dict[str, tuple[str, str]]:
    """Component -> (library, class) from `model_index.json`, absent ones left out. Raises `CheckpointError`."""
    path = folder / MODEL_INDEX
    try:
        document = parse(read_bounded(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object; fetch it again")
    result = {}
    for name, value in document.items():
        if not name.startswith("_") and isinstance(value, list) and len(value) == 2 and value[1] is not None:
            result[name] = (str(value[0]), str(value[1]))
            if not name.isidentifier():
                raise CheckpointError(f"{path}: expected component names, found {name!r}; do not trust it")
    return result


def is_about(name: str) -> bool:
    """Whether a file of a pipeline's root says something about it: licence, notice, card."""
    return "/" not in name and name.upper().startswith(("LICENSE", "NOTICE", CARD_STEM))


def pipeline_files(folder: Path, sharded: Sequence[str]) -> list[str]:
    """All that belongs to a pipeline beside its `sharded` components, relative to its folder: what `is_about` it, the
    other components, no hidden files, and last `model_index.json`, which says that there is a pipeline."""
    names = [name for name in sorted(os.listdir(folder)) if is_about(name) and (folder / name).is_file()]
    if (folder / MODEL_INDEX).is_file():
        for component in pipeline_components(folder):
            if component not in sharded and (folder / component).is_dir():
                inside = (path.relative_to(folder) for path in files_in(folder / component))
                names += sorted(path.as_posix() for path in inside if not any(map(is_hidden, path.parts)))
        names.append(MODEL_INDEX)
    return names


def rest_of_pipeline(folder: Path, sharded: Sequence[str]) -> list[str]:
    """As `pipeline_files`. Raises `CheckpointError` for links that must not be followed (links.py) or lead nowhere."""
    names = pipeline_files(folder, sharded)
    issues = link_issues(names, folder)
    if issues:
        raise CheckpointError(*issues)
    return names
