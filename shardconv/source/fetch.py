"""What a conversion needs of a Hub repo: chosen by name and index, fetched at one commit; headers only in a dry run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from ..errors import CheckpointError, HubError
from ..format.config import no_config, read_config
from ..format.header import MAX_HEADER_NBYTES
from ..format.names import CONFIG_NAME, MODEL_INDEX
from ..format.pipeline import is_about, pipeline_components
from ..format.weights import check_variant
from ..plans.choice import may_be_cut
from ..remote.needed import Needed, is_weights, needed_files
from ..remote.snapshot import Snapshot
from ..remote.store import Listing, Store

HEADER_NBYTES = 128 << 10  # asked for at first; a longer header takes a second request


def fetch(
    repo: Store, revision: str | None, subfolder: str | None, variant: str | None, headers_only: bool
) -> Snapshot:
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
        cut = [name for name, part in listed.items() if may_be_cut(*part)]
    here = Snapshot(repo, listing, Path(), (), temporary=False)
    place = f"{'/'.join(filter(None, (repo.name, subfolder)))} at {listing.short_commit}"
    check_variant(place, [name for each in {"", *components} for name in here.names_in(each)], variant)
    needed = needed_files(repo, listing, components, variant)
    if MODEL_INDEX in first and MODEL_INDEX in listing.files:
        needed.small.extend([MODEL_INDEX, *(name for name in listing.files if is_about(name))])
    names = [*needed.small, *needed.weights]
    if headers_only:
        return _headers_only(repo, listing, needed, cut)
    return Snapshot(repo, listing, repo.fetch(listing, names), names, temporary=False)


def _nothing_there(repo: Store, listing: Listing, subfolder: str | None, first: Sequence[str]) -> str:
    names = Snapshot(repo, listing, Path(), (), temporary=False).names_in(subfolder or "")
    if any(map(is_weights, names)):
        return no_config(f"{'/'.join(filter(None, (repo.name, subfolder)))} at {listing.short_commit}", names)
    place, absent = subfolder or "the repo", " and no ".join(first)
    return f"{repo.name}: nothing to convert in {place}, it has no {absent}; check the name"


def _headers_only(repo: Store, listing: Listing, needed: Needed, cut: Collection[str]) -> Snapshot:
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


def _header(repo: Store, listing: Listing, name: str) -> bytes:
    """The bytes of a safetensors file before its data, or its first ones when it is no such file."""
    start = repo.read_start(listing, name, min(HEADER_NBYTES, max(1, listing.files[name].nbytes)))
    end = 8 + int.from_bytes(start[:8], "little")
    if end > len(start) and end <= min(8 + MAX_HEADER_NBYTES, listing.files[name].nbytes):
        start = repo.read_start(listing, name, end)
    return start[:end]
