"""Reading from the Hub, through huggingface_hub. Every error it raises is a `HubError`."""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import HubError
from ..system.crew import PATIENCE_S, Crew, check_stop
from ..system.jsonfile import MAX_JSON_NBYTES
from .failures import NOT_CACHED, patiently
from .hub_cache import Cache, digest_of, discard, has_length
from .store import Listing, RemoteFile
from .tokens import known_secrets, login_issue, usable_token

FETCHING = 8  # files at once
_COMMIT = re.compile(r"[0-9a-f]{40}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Repo:
    """A model repo of the Hub, and how this process may ask for it: a `Store`."""

    name: str
    token: str | bool | None = field(default=None, repr=False)  # None, True: that of `hf auth login`; False: none
    cache_dir: str | None = None  # None: the client's own
    local_files_only: bool = False
    subject: str = ""  # of error messages; "": the name
    _fresh: set[tuple[str, str]] = field(default_factory=set, repr=False, compare=False)  # (commit, name) just fetched

    @property
    def cache_folder(self) -> Path:
        """Where the client keeps what it fetched, of all repos."""
        from huggingface_hub import constants

        return Path(self.cache_dir or constants.HF_HUB_CACHE).expanduser()

    @property
    def offline(self) -> bool:
        """Whether the Hub must not be asked."""
        from huggingface_hub import constants

        return self.local_files_only or bool(constants.HF_HUB_OFFLINE)

    def _ask(self, call: Callable[[Any], T], subject: str = "", revision: str | None = None) -> T:
        """`call` with the client, patiently; `revision` is the one it asks for."""
        from huggingface_hub import HfApi, constants, get_token
        from huggingface_hub.utils import build_hf_headers

        subject, token = subject or self.subject or self.name, usable_token(self.token)
        issue = "" if self.offline else login_issue(lambda: build_hf_headers(token=token))
        if issue:
            raise HubError(f"{subject}: {issue}")
        api = HfApi(token=token)
        secrets = partial(known_secrets, token, get_token, constants.HF_TOKEN_PATH)
        return patiently(subject, secrets, lambda: call(api), revision)

    def _file(self, name: str) -> str:
        """A file of the repo, as messages call it."""
        return f"{self.subject or self.name}: {name}"

    # Reading

    def listing(self, revision: str | None) -> Listing:
        """What the repo holds at `revision` (None: its main branch). Offline: what the cache has of it."""
        if self.offline:
            return self._cached_listing(revision)
        info = self._ask(
            lambda api: api.model_info(self.name, revision=revision, files_metadata=True), revision=revision
        )
        if not info.sha:
            raise HubError(
                f"{self.subject or self.name}: the answer names no commit, so it is not the Hub's; check HF_ENDPOINT"
            )
        files = {each.rfilename: _remote_file(each) for each in info.siblings or []}
        outside = [name for name in files if name.startswith("/") or ".." in name.split("/")]
        if outside:
            raise HubError(f"{self.subject or self.name}: names {outside[0]!r}, outside of itself; do not trust it")
        gated = None if info.gated is None else str(info.gated or "")
        return Listing(str(info.sha), files, gated, bool(info.private))

    def _cached_listing(self, revision: str | None) -> Listing:
        # No file is asked for: what must be there is looked for file by file, whatever else the repo has.
        options: dict[str, Any] = {"cache_dir": self.cache_dir, "local_files_only": True, "allow_patterns": []}
        subject = f"{self.name} at {revision or 'main'}"
        folder = Path(self._ask(lambda api: api.snapshot_download(self.name, revision=revision, **options), subject))
        paths = [path for path in folder.rglob("*") if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in paths]
        files = {name: RemoteFile(name, path.stat().st_size, "") for name, path in zip(names, paths, strict=True)}
        return Listing(folder.name, files)

    def pin(self, revision: str | None, names: Sequence[str], *, force: bool = False) -> Listing:
        """As `listing`, and the cache remembers which commit `revision` was, so that it can be found offline.

        For that the first of `names` that the repo has is fetched by the name of the revision.
        """
        found = self.listing(revision)
        first = next((name for name in names if name in found.files), None)
        if self.offline or first is None or (revision and _COMMIT.fullmatch(revision)):
            return found
        is_new = force or not self._places(found, first)
        options: dict[str, Any] = {"revision": revision, "cache_dir": self.cache_dir, "force_download": force}
        path = Path(self._ask(lambda api: api.hf_hub_download(self.name, first, **options), revision=revision))
        commit = path.parents[first.count("/")].name
        if commit != found.commit:  # somebody has just pushed
            found, is_new = self.listing(commit), True
        if is_new:
            self._check_arrived(path, found, first)
        return found

    def fetch(
        self, listing: Listing, names: Iterable[str], *, force: bool = False, heed: Callable[[], None] = lambda: None
    ) -> Path:
        """Bring files into the cache, unless they are there; returns the folder of the snapshot.

        A file is transferred when force is asked for, when the cache does not have its content, under whatever commit,
        or has it at another length. What is transferred is compared with the Hub's digest, and thrown away when it
        differs. Offline every file that is not there is named. `heed` is asked meanwhile and raises when nobody wants
        the files any more; then, as after an error, no download is waited for.
        """
        names = sorted(set(names))
        if self.offline:
            return self._fetched(listing, names)
        with Crew(min(FETCHING, len(names)), "shardconv-fetch", heed=heed, patience_s=PATIENCE_S) as crew:
            paths = crew.results([crew.submit(partial(self._fetch_one, listing, name, force)) for name in names])
        return paths[0].parents[names[0].count("/")]

    def cached(self, listing: Listing, name: str) -> Path | None:
        """Where the cache has a file at its full length: of this commit, or its content of another one."""
        return next((path for path in self._places(listing, name) if has_length(path, listing.nbytes(name))), None)

    @property
    def _cache(self) -> Cache:
        return Cache.of(self.name, self.cache_folder)

    def _places(self, listing: Listing, name: str) -> list[Path]:
        return self._cache.places(listing.commit, name, listing.digest(name))

    def _fetched(self, listing: Listing, names: Sequence[str]) -> Path:
        """The folder of the snapshot, all of `names` in it, without asking the Hub."""
        links = {name: self._cache.link(listing.commit, name) for name in names}
        issues = [self.not_cached(listing, name) for name, link in links.items() if link is None]
        issues += [
            f"{self.name} at {listing.short_commit}: {name}: shortened or replaced in the cache; fetch it once with a "
            f"network ({self._way(listing.commit, name, '--force-download')})"
            for name, link in links.items()
            if link and not has_length(link, listing.nbytes(name))
        ]
        if issues:
            raise HubError(*issues)
        return next(link.parents[name.count("/")] for name, link in links.items() if link)

    def not_cached(self, listing: Listing, name: str) -> str:
        """The sentence for a file that is missing, offline."""
        where = f"{self.name} at {listing.short_commit}: {name}"
        return f"{where}: {NOT_CACHED} ({self._way(listing.commit, name)})"

    def _way(self, commit: str, name: str, *flags: str) -> str:
        """How to bring a file into the cache."""
        instead = "without local_files_only" if self.local_files_only else "without HF_HUB_OFFLINE"
        words = ["hf", "download", self.name, name, "--revision", commit, *flags]
        words += ["--cache-dir", self.cache_dir] if self.cache_dir else []
        return f"{instead}, or: {shlex.join(words)}"

    def _fetch_one(self, listing: Listing, name: str, force: bool) -> Path:
        force = force and (listing.commit, name) not in self._fresh
        places = self._places(listing, name)
        whole = [path for path in places if has_length(path, listing.nbytes(name))]
        if whole and whole[0] == self._cache.link(listing.commit, name) and not force:
            return whole[0]
        force = force or len(whole) < len(places)
        options = {"revision": listing.commit, "cache_dir": self.cache_dir, "force_download": force}
        path = self._get(listing, name, **options)
        if force or not any(os.path.samefile(path, each) for each in whole):
            self._check_arrived(path, listing, name)
        return path

    def _get(self, listing: Listing, name: str, **options: Any) -> Path:
        """The client's download of a file."""
        ask = self._ask(
            lambda api: api.hf_hub_download(self.name, name, **options, **_bar(api)),
            self._file(name),
            listing.short_commit,
        )
        return Path(ask)

    def _check_arrived(self, path: Path, listing: Listing, name: str) -> None:
        """Throw a downloaded file away, and raise, when it is not what the Hub has."""
        expected = listing.digest(name)
        if expected and digest_of(path, expected) != expected:
            discard(path)
            raise HubError(
                f"{self._file(name)}: arrived altered (its digest is not the Hub's) and was thrown away; run again, or "
                "fetch it afresh with force_download=True"
            )
        self._fresh.add((listing.commit, name))

    def download(self, listing: Listing, name: str, folder: Path) -> Path:
        """Bring a file to `folder`, not into the cache; one that is there already is looked at, not fetched again."""
        link = self._cache.link(listing.commit, name)  # the client would copy it, whatever its length
        stale = link is not None and not has_length(link, listing.nbytes(name))
        path = self._get(listing, name, revision=listing.commit, local_dir=folder, force_download=stale)
        self._check_arrived(path, listing, name)
        return path

    def read_start(self, listing: Listing, name: str, nbytes: int) -> bytes:
        """The first `nbytes` of a file, from the cache or by a byte range; nothing is kept."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        path = self.cached(listing, name)
        if path:
            with open(path, "rb") as file:
                return file.read(nbytes)

        def read(api: Any) -> bytes:
            url = hf_hub_url(self.name, name, revision=listing.commit, endpoint=api.endpoint)
            headers = build_hf_headers(token=usable_token(self.token))
            headers |= {"Range": f"bytes=0-{nbytes - 1}", "Accept-Encoding": "identity"}
            with get_session().stream("GET", url, headers=headers, timeout=30) as response:
                hf_raise_for_status(response)
                data = bytearray()
                for chunk in response.iter_bytes(1 << 16):
                    data += chunk
                    if len(data) >= nbytes:  # also where the range was ignored
                        break
            return bytes(data[:nbytes])

        return self._ask(read, self._file(name))

    def read(self, listing: Listing, name: str) -> bytes:
        """A small file, whole; nothing is kept. Raises `HubError` for one that is not small."""
        nbytes = listing.files[name].nbytes
        if nbytes > MAX_JSON_NBYTES:
            raise HubError(
                f"{self._file(name)}: {nbytes:,} bytes, at most {MAX_JSON_NBYTES:,} are read; it cannot be what "
                "its name says, remove it from the repo"
            )
        return self.read_start(listing, name, max(1, nbytes))


def _bar(api: Any) -> dict[str, Any]:
    """What has a download look whether it is still wanted, where the client shows how far it is."""
    if "tqdm_class" not in inspect.signature(api.hf_hub_download).parameters:
        return {}
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def update(self, n: float | None = 1) -> bool | None:
            check_stop()
            return bool(super().update(n))

    return {"tqdm_class": Bar}


def _remote_file(about: Any) -> RemoteFile:
    """From what the client knows of a file."""
    digest = about.lfs.sha256 if about.lfs else about.blob_id
    nbytes = about.size if about.size is not None else about.lfs.size if about.lfs else 0
    return RemoteFile(about.rfilename, int(nbytes or 0), str(digest or ""))
