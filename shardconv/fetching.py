"""What a conversion needs of a Hub repo: chosen by name and index, fetched at one commit; headers only in a dry run."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import CONFIG_NAME, MANIFEST_NAME, WEIGHTS_STEM, read_index, select_files
from .errors import CheckpointError, HubError
from .header import MAX_HEADER_NBYTES
from .hub import Listing, Repo
from .sources import MODEL_INDEX, pipeline_components

HEADER_NBYTES = 128 << 10  # asked for at first; a longer header takes a second request
_ABOUT = ("LICENSE", "README", "NOTICE")
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5", ".onnx", ".onnx_data", ".gguf", ".pb",
    ".flashpack", ".tflite",
)  # fmt: skip
_STEMS = (WEIGHTS_STEM, "model")  # of diffusers' and of transformers' components


class Snapshot:
    """A repo's files on this disk, at one commit. `folder` lives as long as this object where nothing was kept."""

    def __init__(self, repo: Repo, listing: Listing, folder: Path, names: Collection[str], temporary: bool) -> None:
        self.repo = repo
        self.listing = listing
        self.folder = folder
        self.names = tuple(dict.fromkeys(names))  # in the repo, of all files that a conversion reads
        if temporary:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def missing(self) -> dict[str, int]:
        """Name -> bytes of the files that are not in the cache."""
        names = [name for name in self.names if not self.repo.cached(self.listing, name)]
        return {name: self.listing.files[name].nbytes for name in names}

    def names_in(self, component: str) -> list[str]:
        """Names of all files of the repo that stand directly in a component's folder, fetched or not."""
        prefix = f"{component}/" if component else ""
        names = [name.removeprefix(prefix) for name in self.listing.files if name.startswith(prefix)]
        return sorted(name for name in names if "/" not in name)

    def spoken(self, text: str) -> str:
        """A sentence about places in `folder` as one about the repo at its commit."""
        place = re.compile(rf"{re.escape(str(self.folder))}((?:/[\w.-]*\w)*)")
        return place.sub(rf"{self.repo.name}\1 at {self.listing.commit[:7]}", text)

    def about(self, issue: str) -> str:
        """A fault of a file of the repo, which may name the file alone, as one that names repo and commit too."""
        spoken = self.spoken(issue)
        return spoken if self.repo.name in spoken else f"{self.repo.name} at {self.listing.commit[:7]}: {spoken}"

    def rest(self, sharded: Collection[str]) -> list[str]:
        """Names of the files that do not belong to the components `sharded`."""
        return [name for name in self.names if name.rpartition("/")[0].split("/")[0] not in sharded]


@dataclass(frozen=True, slots=True)
class _Needed:
    """Names in the repo."""

    small: list[str]  # configs, indexes, tokenizers
    weights: list[str]


def fetch(repo: Repo, revision: str | None, subfolder: str | None, variant: str | None, headers_only: bool) -> Snapshot:
    """Bring what a conversion of `repo` reads to this disk, pinned to the commit that `revision` names now.

    `subfolder` limits it to one component; of a pipeline come the components that its `model_index.json` names, each
    with the weight files of the variant, or the default ones where it has none. With `headers_only` the weight files of
    diffusers' components come as their headers in front of a hole, other weights not at all. Raises `HubError`,
    `CheckpointError`.
    """
    prefix = f"{subfolder}/" if subfolder else ""
    first = [f"{prefix}{CONFIG_NAME}"] if subfolder else [MODEL_INDEX, CONFIG_NAME]
    listing = repo.pin(revision, first)
    if not any(name in listing.files for name in first) and repo.offline:
        raise HubError(repo.not_cached(listing, first[0]))
    if not any(name in listing.files for name in first):
        raise CheckpointError(
            f"{repo.name}: nothing to convert in {subfolder or 'the repo'}, it has no {' and no '.join(first)}; check "
            "the name"
        )
    if subfolder or MODEL_INDEX not in listing.files:
        components = cut = [subfolder or ""]
    else:
        listed = pipeline_components(repo.fetch(listing, [MODEL_INDEX]))
        components = list(listed)
        cut = [name for name, (library, _) in listed.items() if library == "diffusers"]
    needed = _needed(repo, listing, components, variant)
    if MODEL_INDEX in first and MODEL_INDEX in listing.files:
        needed.small.extend([MODEL_INDEX, *(name for name in listing.files if _is_about(name))])
    names = [*needed.small, *needed.weights]
    if headers_only:
        return _headers_only(repo, listing, needed, cut)
    return Snapshot(repo, listing, repo.fetch(listing, names), names, temporary=False)


def component_files(repo: Repo, listing: Listing, components: Iterable[str], variant: str | None) -> list[str]:
    """Names of all files that loading these components, uncut, reads; indexes are fetched."""
    needed = _needed(repo, listing, components, variant)
    return [*needed.small, *needed.weights]


def _is_about(name: str) -> bool:
    return "/" not in name and name.upper().startswith(_ABOUT)


def _needed(repo: Repo, listing: Listing, components: Iterable[str], variant: str | None) -> _Needed:
    needed = _Needed([], [])
    for component in components:
        prefix = f"{component}/" if component else ""
        names = [name.removeprefix(prefix) for name in listing.files if name.startswith(prefix)]
        here = [name for name in names if "/" not in name and not name.startswith(".")]
        needed.small.extend(prefix + name for name in here if not _is_weights(name))
        if component and not _has_sets(names):
            inner = [name for name in names if "/" in name and not _is_weights(name.rpartition("/")[2])]
            needed.small.extend(prefix + name for name in inner)
        needed.weights.extend(prefix + name for name in _weights(repo, listing, prefix, here, variant, needed.small))
    return needed


def _has_sets(names: Iterable[str]) -> bool:
    return any(name.endswith(f"/{MANIFEST_NAME}") for name in names)


def _is_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS) or ".safetensors." in name or ".bin." in name


def _weights(
    repo: Repo, listing: Listing, prefix: str, names: list[str], variant: str | None, small: list[str]
) -> list[str]:
    """Weight files of one component; its index is added to `small`."""
    selection = next((found for stem in _STEMS if (found := select_files(names, variant, stem))), None)
    if selection is None:
        return [name for name in names if name.endswith(".safetensors")]
    if selection.index is None:
        return [str(selection.single)]
    small.append(prefix + selection.index)
    folder = repo.fetch(listing, [prefix + selection.index])
    return sorted(set(read_index(folder / f"{prefix}{selection.index}").values()))


def _headers_only(repo: Repo, listing: Listing, needed: _Needed, cut: Collection[str]) -> Snapshot:
    folder = Path(tempfile.mkdtemp(prefix="shardconv-headers-"))
    names = [name for name in (*needed.small, *needed.weights) if name in listing.files]
    snapshot = Snapshot(repo, listing, folder, names, temporary=True)
    kept = [name for name in needed.small if Path(name).name in (CONFIG_NAME, MODEL_INDEX) or ".safetensors." in name]
    cached = repo.fetch(listing, kept)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in kept:
        shutil.copyfile(cached / name, folder / name)
    for name in needed.weights:  # one that the index names and the repo lacks is the conversion's to report
        if name.rpartition("/")[0] in cut and name in listing.files:
            with open(folder / name, "wb") as file:
                file.write(_header(repo, listing, name))
                file.truncate(listing.files[name].nbytes)
    return snapshot


def _header(repo: Repo, listing: Listing, name: str) -> bytes:
    """The bytes of a safetensors file before its data, or its first ones when it is no such file."""
    start = repo.read_start(listing, name, min(HEADER_NBYTES, max(1, listing.files[name].nbytes)))
    end = 8 + int.from_bytes(start[:8], "little")
    if end > len(start) and end <= min(8 + MAX_HEADER_NBYTES, listing.files[name].nbytes):
        start = repo.read_start(listing, name, end)
    return start[:end]
