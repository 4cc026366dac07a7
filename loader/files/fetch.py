"""A Hub repo as path: each rank fetches its own files, one rank a disk the shared ones, all of them at one commit."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardconv.errors import HubError, LoadError, SetError, UsageError
from shardconv.format.names import (
    CONFIG_NAME,
    MANIFEST_NAME,
    MODEL_INDEX,
    REPLICATED_FILE,
    rank_file_name,
    set_folder_name,
)
from shardconv.format.pipeline import pipeline_components
from shardconv.remote.choose import is_store_name, store_named
from shardconv.remote.needed import component_files
from shardconv.remote.store import Listing, RemoteFile, Store, degrees_in
from shardconv.remote.tokens import usable_token
from shardconv.system.crew import stoppable

from ..group.agreement import agree, exchange, heed
from ..group.ranks import Ranks

FETCH_S = 12 * 3600  # that a rank waits for others to download; one whose process ends is noticed before


@dataclass(frozen=True, slots=True)
class Asking:
    """How the Hub may be asked; as in `load_model`."""

    revision: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    force_download: bool = False

    def repo(self, name: str) -> Store:
        """The client's view of `name`. Raises `UsageError` for wishes that contradict each other."""
        if self.force_download and self.local_files_only:
            raise UsageError("force_download: fetches afresh, which local_files_only forbids; give one of them")
        cache_dir = None if self.cache_dir is None else os.fspath(self.cache_dir)
        subject = f"{name}: not a folder here, and the Hub says"
        repo = store_named(
            name,
            token=usable_token(self.token),
            cache_dir=cache_dir,
            local_files_only=self.local_files_only,
            subject=subject,
        )
        if self.force_download and repo.offline:
            raise UsageError("force_download: fetches afresh, which HF_HUB_OFFLINE forbids; unset it, or leave it out")
        return repo


def is_repo(path: str | os.PathLike[str], ranks: Ranks) -> bool:
    """Whether `path` names a repo: it can be one, and there is no folder of that name, which comes first.

    Every rank must call it, whatever its name for the place looks like. Raises `LoadError` when it is a repo for some
    ranks only, and when they name different ones.
    """

    def look() -> str:
        name = os.fspath(path)
        return f"folder {name}" if Path(name).exists() else f"repo {name}" if is_store_name(name) else f"nothing {name}"

    places = [told.split(" ", 1) for told in exchange(ranks, look)]
    if "repo" not in {kind for kind, _ in places}:
        return False
    if len({kind for kind, _ in places}) > 1:
        how = {"folder": "the folder {}", "repo": "no folder {}, so a Hub repo", "nothing": "no folder {}"}
        found = "; ".join(f"rank {rank}: {how[kind].format(name)}" for rank, (kind, name) in enumerate(places))
        raise LoadError(
            f"path: expected one place for all ranks, found {found}; put the folder on every node, or, to load the "
            "repo, take it away"
        )
    if len({name for _, name in places}) > 1:
        names = ", ".join(f"{name} on rank {rank}" for rank, (_, name) in enumerate(places))
        raise LoadError(f"path: expected one repo for all ranks, found {names}; give every rank the same")
    return True


def needed_files(degree: int, rank: int, size: int) -> list[str]:
    """What `rank` of `size` alone needs of a set of tp degree `degree`, a multiple of `size`: names in its folder."""
    joined = degree // size
    return [rank_file_name(each, degree) for each in range(rank * joined, (rank + 1) * joined)]


def fetch_set(name: str, subfolder: str | None, ranks: Ranks, asking: Asking) -> Path:
    """The folder of the set for this group, with this rank's files in it. Every rank must call it."""
    repo, component = agree(ranks, lambda: asking.repo(name)), subfolder or ""
    listing, leads = _begin(repo, [_inside(component, CONFIG_NAME)], ranks, asking)
    own, shared = agree(ranks, lambda: _set_files(repo, listing, component, ranks))
    folder = _fetch(repo, listing, own, lambda: shared, leads, ranks, asking)
    return folder / Path(own[0]).parent


def fetch_pipeline(name: str, given: Collection[str], variant: str | None, ranks: Ranks, asking: Asking) -> Path:
    """The folder of a pipeline with this rank's files in it, of all components but those `given`. Every rank must call
    it."""
    repo = agree(ranks, lambda: asking.repo(name))
    listing, leads = _begin(repo, [MODEL_INDEX], ranks, asking)

    def choose() -> tuple[list[str], list[tuple[list[str], list[str]]]]:
        """The components that are not sharded, and the files of those that are."""
        if MODEL_INDEX not in listing.files and repo.offline:
            raise HubError(repo.not_cached(listing, MODEL_INDEX))
        if MODEL_INDEX not in listing.files:
            raise SetError(f"{name}: no {MODEL_INDEX}, so not a converted pipeline; use load_model for one component")
        wanted = [each for each in pipeline_components(repo.fetch(listing, [MODEL_INDEX])) if each not in given]
        whole = [each for each in wanted if not degrees_in(listing, each)]
        if whole == wanted and not given:
            raise SetError(f"{name}: no component holds a converted set; run: shardconv convert --tp N {name} OUT")
        return whole, [_set_files(repo, listing, each, ranks) for each in wanted if each not in whole]

    whole, sets = agree(ranks, choose)

    def shared() -> list[str]:
        rest = component_files(repo, listing, whole, variant)
        return [MODEL_INDEX, *rest, *(file for _, files in sets for file in files)]

    own = [file for files, _ in sets for file in files]
    return _fetch(repo, listing, own, shared, leads, ranks, asking)


def _begin(repo: Store, first: list[str], ranks: Ranks, asking: Asking) -> tuple[Listing, bool]:
    """The repo at the commit that rank 0 finds, and whether this rank is the first of those that share its cache."""
    place = _place(repo.cache_folder)

    def ask() -> str:
        pin = partial(repo.pin, asking.revision, first, force=asking.force_download)
        found = stoppable(pin, partial(heed, ranks), "loader-pin") if ranks.rank == 0 else None
        files = [[file.name, file.nbytes, file.digest] for file in found.files.values()] if found else []
        return json.dumps([place, found.commit if found else "", files])

    heard: list[Any] = [json.loads(told) for told in exchange(ranks, ask)]
    _, commit, files = heard[0]
    places = [each[0] for each in heard]
    return Listing(commit, {file[0]: RemoteFile(*file) for file in files}, ""), places.index(place) == ranks.rank


def _place(cache: Path) -> str:
    """The same text on all ranks that see the same cache on the same node."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        status = cache.stat()
    except OSError:
        return f"{socket.gethostname()} {cache}"
    return f"{socket.gethostname()} {status.st_dev} {status.st_ino}"


def _fetch(
    repo: Store,
    listing: Listing,
    own: list[str],
    shared: Callable[[], list[str]],
    leads: bool,
    ranks: Ranks,
    asking: Asking,
) -> Path:
    """Fetch `own` on every rank, `shared` on the leading ones; then all of them find all in their cache."""

    patient = replace(ranks, timeout_s=FETCH_S)
    wanted = partial(heed, patient)

    def fetch() -> None:
        names = [*own, *(stoppable(shared, wanted, "loader-fetch") if leads else [])]
        if names:
            repo.fetch(listing, names, force=asking.force_download, heed=wanted)

    agree(patient, fetch)
    return agree(patient, lambda: repo.fetch(listing, [*own, *shared()], heed=wanted))


def _set_files(repo: Store, listing: Listing, component: str, ranks: Ranks) -> tuple[list[str], list[str]]:
    """(own, shared) names in the repo of the set for this group. Raises `SetError` when no set fits."""
    held = degrees_in(listing, component)
    fitting = [degree for degree in held if degree % ranks.size == 0]
    if not fitting:
        raise SetError(_no_set(repo, listing, component, held, ranks.size))
    degree = min(fitting)
    folder = _inside(component, set_folder_name(degree))
    own = [f"{folder}/{name}" for name in needed_files(degree, ranks.rank, ranks.size)]
    shared = [_inside(component, CONFIG_NAME), f"{folder}/{MANIFEST_NAME}"]
    replicated = f"{folder}/{REPLICATED_FILE}"
    absent = [name for name in own + shared if name not in listing.files]
    if absent and not repo.offline:  # offline it was not fetched, as far as this cache goes
        raise SetError(f"{_where(repo, listing, component)}: {folder} lacks {', '.join(absent)}; push it again, whole")
    return own, shared + ([replicated] if replicated in listing.files else [])


def _no_set(repo: Store, listing: Listing, component: str, held: Collection[int], size: int) -> str:
    where = _where(repo, listing, component)
    if held:
        return (
            f"{where}: converted for tp degree {' and '.join(map(str, held))}, this group has {size} ranks; start as "
            f"many as that, or run: shardconv convert --tp {size} SOURCE OUT"
        )
    inner = sorted({name.split("/")[0] for name in listing.files if name.count("/") == 2})
    inner = [name for name in inner if degrees_in(listing, name)]
    if inner and not component:
        return f"{where}: the set is in {', '.join(inner)}; add subfolder={inner[0]!r}"
    if repo.offline:
        return f"{where}: no {MANIFEST_NAME} of a set; fetch it once with a network, or check repo and subfolder"
    return f"{where}: no converted set in it; run: shardconv convert --tp {size} {repo.name} OUT"


def _where(repo: Store, listing: Listing, component: str) -> str:
    known = " as far as it is in the cache" if repo.offline else ""
    return f"{repo.name} at {listing.short_commit}{known}" + (f", {component}" if component else "")


def _inside(component: str, name: str) -> str:
    return f"{component}/{name}" if component else name
