"""Which files of a remote a conversion or a load of some components takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import CheckpointError
from ..format.names import MANIFEST_NAME, WEIGHTS_STEMS
from ..format.weights import read_index, select_files
from .snapshot import Snapshot
from .store import Listing, Store

_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5", ".onnx", ".onnx_data", ".gguf", ".pb",
    ".flashpack", ".tflite",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Needed:
    """Names in the repo."""

    small: list[str]  # configs, indexes, tokenizers
    weights: list[str]


def component_files(repo: Store, listing: Listing, components: Iterable[str], variant: str | None) -> list[str]:
    """Names of all files that loading these components, uncut, reads; indexes are fetched."""
    needed = needed_files(repo, listing, components, variant)
    return [*needed.small, *needed.weights]


def needed_files(repo: Store, listing: Listing, components: Iterable[str], variant: str | None) -> Needed:
    needed = Needed([], [])
    for component in components:
        prefix = f"{component}/" if component else ""
        names = [name.removeprefix(prefix) for name in listing.files if name.startswith(prefix)]
        here = [name for name in names if "/" not in name and not name.startswith(".")]
        needed.small.extend(prefix + name for name in here if not is_weights(name))
        if component and not _has_sets(names):
            inner = [name for name in names if "/" in name and not is_weights(name.rpartition("/")[2])]
            needed.small.extend(prefix + name for name in inner if "/." not in f"/{name}")
        needed.weights.extend(prefix + name for name in _weights(repo, listing, prefix, here, variant, needed.small))
    return needed


def _has_sets(names: Iterable[str]) -> bool:
    return any(name.endswith(f"/{MANIFEST_NAME}") for name in names)


def is_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS) or ".safetensors." in name or ".bin." in name


def _weights(
    repo: Store, listing: Listing, prefix: str, names: list[str], variant: str | None, small: list[str]
) -> list[str]:
    """Weight files of one component; its index is added to `small`."""
    selection = next((found for stem in WEIGHTS_STEMS if (found := select_files(names, variant, stem))), None)
    if selection is None:
        return [name for name in names if name.endswith(".safetensors")] or _pickled(prefix, names, variant, small)
    if selection.index is None:
        return [str(selection.single)]
    index = prefix + selection.index
    small.append(index)
    folder = repo.fetch(listing, [index])
    with Snapshot(repo, listing, folder, (), temporary=False).speaking(prefix.rstrip("/")):
        listed = sorted(set(read_index(folder / index).values()))
        absent = [name for name in listed if prefix + name not in listing.files and not repo.offline]
        if absent:
            raise CheckpointError(
                *(f"{name}: named by {index}, absent from the repo; tell its owner" for name in absent)
            )
    return listed


def _pickled(prefix: str, names: Sequence[str], variant: str | None, small: list[str]) -> list[str]:
    """The pickled weight files of a component that has no others, as a pipeline of a folder would keep them. Those of a
    denoiser stay where they are: it will be refused for them."""
    if not prefix or prefix.startswith("transformer"):
        return []
    for tag in (f".{variant}" if variant else "", ""):
        file = re.compile(rf"(diffusion_)?pytorch_model(-\d+-of-\d+)?{re.escape(tag)}(-\d+-of-\d+)?\.bin")
        index = re.compile(rf"(diffusion_)?pytorch_model\.bin\.index{re.escape(tag)}\.json")
        found = [name for name in names if file.fullmatch(name)]
        if found:
            small += [prefix + name for name in names if index.fullmatch(name)]
            return found
    return []
