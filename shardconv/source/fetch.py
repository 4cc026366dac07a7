"""What a conversion needs of a Hub repo: chosen by name and index, fetched at one commit; headers only in a dry run."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, HubError, ShardconvError
from ..format.config import no_config, read_config
from ..format.header import MAX_HEADER_NBYTES
from ..format.names import CONFIG_NAME, MANIFEST_NAME, MODEL_INDEX, WEIGHTS_STEM
from ..format.pipeline import pipeline_components
from ..format.weights import check_variant, read_index, select_files
from ..remote.hub import Repo
from ..remote.store import Listing

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
        return place.sub(rf"{self.repo.name}\1 at {self.listing.short_commit}", text)

    @contextmanager
    def speaking(self, component: str = "", out: Path | None = None) -> Iterator[None]:
        """Faults found within speak of the repo at its commit instead of `folder`; those of the checkpoint, which may
        name a file or a tensor of `component` alone, get repo and commit, if they are not about `out`."""

        def about(issue: str) -> str:
            spoken = self.spoken(issue)
            if self.repo.name in spoken or (out and spoken.startswith(str(out))):
                return spoken
            return f"{'/'.join(filter(None, (self.repo.name, component)))} at {self.listing.short_commit}: {spoken}"

        try:
            yield
        except ShardconvError as error:
            raise error.reworded(about if isinstance(error, CheckpointError) else self.spoken) from None

    def rest(self, sharded: Collection[str]) -> list[str]:
        """Names of the files that do not belong to the components `sharded`; `model_index.json` last."""
        rest = [name for name in self.names if name.rpartition("/")[0].split("/")[0] not in sharded]
        return sorted(rest, key=lambda name: name == MODEL_INDEX)


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
        raise CheckpointError(_nothing_there(repo, listing, subfolder, first))
    if subfolder or MODEL_INDEX not in listing.files:
        components = cut = [subfolder or ""]
        read_config(repo.fetch(listing, [f"{prefix}{CONFIG_NAME}"]) / prefix)  # what it refuses need not be fetched
    else:
        folder = repo.fetch(listing, [MODEL_INDEX])
        with Snapshot(repo, listing, folder, (), temporary=False).speaking():
            listed = pipeline_components(folder)
        components = list(listed)
        cut = [name for name, (library, _) in listed.items() if library == "diffusers"]
    here = Snapshot(repo, listing, Path(), (), temporary=False)
    place = f"{'/'.join(filter(None, (repo.name, subfolder)))} at {listing.short_commit}"
    check_variant(place, [name for each in {"", *components} for name in here.names_in(each)], variant)
    needed = _needed(repo, listing, components, variant)
    if MODEL_INDEX in first and MODEL_INDEX in listing.files:
        needed.small.extend([MODEL_INDEX, *(name for name in listing.files if _is_about(name))])
    names = [*needed.small, *needed.weights]
    if headers_only:
        return _headers_only(repo, listing, needed, cut)
    return Snapshot(repo, listing, repo.fetch(listing, names), names, temporary=False)


def _nothing_there(repo: Repo, listing: Listing, subfolder: str | None, first: Sequence[str]) -> str:
    names = Snapshot(repo, listing, Path(), (), temporary=False).names_in(subfolder or "")
    if any(map(_is_weights, names)):
        return no_config(f"{'/'.join(filter(None, (repo.name, subfolder)))} at {listing.short_commit}", names)
    place, absent = subfolder or "the repo", " and no ".join(first)
    return f"{repo.name}: nothing to convert in {place}, it has no {absent}; check the name"


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
            needed.small.extend(prefix + name for name in inner if "/." not in f"/{name}")
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
    for name in needed.weights:
        if name.rpartition("/")[0] in cut and name in listing.files and name.endswith(".safetensors"):
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
