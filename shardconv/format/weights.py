"""Which files of a component folder make up the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..system.jsonfile import parse, read_bounded
from ..system.links import refuse_link_out
from .names import WEIGHTS_STEM, WEIGHTS_STEMS


@dataclass(frozen=True, slots=True)
class Selection:
    """Which file names of a folder make up the checkpoint."""

    index: str | None
    single: str | None
    variant: str | None


def select_files(
    names: Iterable[str], variant: str | None, stem: str = WEIGHTS_STEM, prefers_single: bool = False
) -> Selection | None:
    """The index or single weight file that `from_pretrained(variant=...)` takes among `names`; None when none fits.

    Names as diffusers has used them: `X.safetensors.index.fp16.json` (now), `X.safetensors.fp16.index.json` (before),
    `X.fp16.safetensors`. A folder without files of the variant falls back to the default files, as pipelines do. `stem`
    is the X; transformers' components have "model". `prefers_single`: a single file comes before an index beside it.
    """
    present = set(names)
    tags = [variant, None] if variant else [None]
    for tag in tags:
        indexes = [f"{stem}.safetensors.index{'.' + tag if tag else ''}.json"]
        if tag:
            indexes.append(f"{stem}.safetensors.{tag}.index.json")
        single = f"{stem}{'.' + tag if tag else ''}.safetensors"
        index = next((name for name in indexes if name in present), None)
        if single in present and (prefers_single or not index):
            return Selection(None, single, tag)
        if index:
            return Selection(index, None, tag)
    return None


_VARIANTS = (  # how the name of a single file or of an index tells its variant, now and before
    re.compile(r"(\.(?P<variant>(?!.*-\d+-of-\d+)[\w-]+))?\.safetensors"),
    re.compile(r"\.safetensors\.index(\.(?P<variant>[\w-]+))?\.json"),
    re.compile(r"\.safetensors\.(?P<variant>[\w-]+)\.index\.json"),
)


def variants_in(names: Iterable[str]) -> set[str | None]:
    """Variants of weights among file names, which may be in folders; of diffusers' components and of transformers'. The
    default ones are None; shards without their index are no weights."""
    found: set[str | None] = set()
    for name in (name.rpartition("/")[2] for name in names):
        stem = next((stem for stem in WEIGHTS_STEMS if name.startswith(stem)), None)
        matches = (pattern.fullmatch(name[len(stem) :]) for pattern in _VARIANTS) if stem else ()
        found |= {match["variant"] for match in matches if match}
    return found


def check_variant(place: object, names: Iterable[str], variant: str | None) -> None:
    """Raises `CheckpointError` when no file has the variant, as when it is mistyped."""
    found = variants_in(names)
    if variant is not None and variant not in found:
        there = ", ".join(name or "the default ones" for name in sorted(found, key=lambda name: name or ""))
        raise CheckpointError(
            f"{place}: expected weights of variant {variant!r}, found {there or 'none'}; choose another --variant or "
            "leave it out"
        )


def read_index(path: Path) -> dict[str, str]:
    """`weight_map` of an index: tensor name -> plain file name. Raises `CheckpointError`, every fault at once."""
    refuse_link_out(path)
    try:
        document = parse(read_bounded(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name}: cannot be read as JSON ({error}); fetch it again") from None
    listed = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(f"{path.name}: expected a weight_map of tensor to file, found none; fetch it again")
    issues = []
    for name in sorted(set(map(str, listed.values()))):
        if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
            issues.append(f"{path.name}: expected plain file names of its own folder, found {name!r}; do not trust it")
        elif not name.endswith(".safetensors"):
            issues.append(f"{path.name}: expected safetensors files, found {name!r}; save it with safe_serialization")
    if issues:
        raise CheckpointError(*issues)
    return listed


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """The first few of `names`, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
