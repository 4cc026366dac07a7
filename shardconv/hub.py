"""The only module that talks to the Hub, through huggingface_hub. Every error it raises is a `HubError`."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .checkpoint import MANIFEST_NAME
from .crew import PATIENCE_S, Crew, check_stop
from .destination import degree_of
from .errors import HubError, UsageError
from .hub_errors import patiently
from .jsonfile import MAX_JSON_NBYTES

FETCHING = 8  # files at once
SMALL_NBYTES = 1 << 20  # below it, files are sent together
_COMMIT = re.compile(r"[0-9a-f]{40}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repo at one commit."""

    name: str  # path in the repo
    nbytes: int
    digest: str  # sha256 of a large file, git's sha1 of a small one, hex; "" when only the cache was asked


@dataclass(frozen=True, slots=True)
class Listing:
    """A repo at one commit."""

    commit: str
    files: Mapping[str, RemoteFile]
    gated: str  # "auto", "manual", or "" when it is not


def is_repo_name(name: str) -> bool:
    """Whether a SOURCE that is no path here can be a repo, `org/name`."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name))


def usable_token(token: str | bool | None) -> str | bool | None:
    """A token as the client takes it: what a file or a variable has around it is taken off, an empty one is none given.

    Raises `UsageError`, without quoting it, when it could not be sent.
    """
    if not isinstance(token, str):
        return token
    stripped = token.strip()
    if any(not "!" <= sign <= "~" for sign in stripped):
        raise UsageError("token: expected printable ASCII without spaces, found something else in it; copy it again")
    return stripped or None


def cache_folder(cache_dir: str | None) -> Path:
    """Where the client keeps what it fetched."""
    from huggingface_hub import constants

    return Path(cache_dir or constants.HF_HUB_CACHE)


def degrees_in(listing: Listing, component: str) -> dict[int, str]:
    """tp degree -> folder of the sets of a component ("" for the root) in a repo."""
    folders = [name.removesuffix(f"/{MANIFEST_NAME}") for name in listing.files if name.endswith(f"/{MANIFEST_NAME}")]
    parts = [folder.rpartition("/") for folder in folders]
    return dict(sorted((degree, f"{place}/{name}".lstrip("/")) for place, _, name in parts
                       if place == component and (degree := degree_of(name))))  # fmt: skip


def digest_of(path: Path, like: str) -> str:
    """The digest of a file, of the kind that `like` is."""
    digest = hashlib.sha256() if len(like) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Repo:
    """A model repo, and how this process may ask for it."""

    name: str
    token: str | bool | None = field(default=None, repr=False)  # None, True: that of `hf auth login`; False: none
    cache_dir: str | None = None  # None: the client's own
    local_files_only: bool = False
    subject: str = ""  # of error messages; "": the name

    @property
    def offline(self) -> bool:
        """Whether the Hub must not be asked."""
        from huggingface_hub import constants

        return self.local_files_only or bool(constants.HF_HUB_OFFLINE)

    def _ask(self, call: Callable[[Any], T], subject: str = "") -> T:
        """`call` with the client, patiently."""
        import huggingface_hub

        token = usable_token(self.token)
        secrets = tuple(each for each in (token, huggingface_hub.get_token()) if isinstance(each, str))
        api = huggingface_hub.HfApi(token=token)
        return patiently(subject or self.subject or self.name, secrets, lambda: call(api))

    def _file(self, name: str) -> str:
        """A file of the repo, as messages call it."""
        return f"{self.subject or self.name}: {name}"

    # Reading

    def listing(self, revision: str | None) -> Listing:
        """What the repo holds at `revision` (None: its main branch). Offline: what the cache has of it."""
        if self.offline:
            return self._cached_listing(revision)
        try:
            info = self._ask(lambda api: api.model_info(self.name, revision=revision, files_metadata=True))
        except HubError as error:
            if error.kind == "no revision":
                said = f"no revision {revision!r} in the repo; check its branches and tags on its page"
                error.issues = (f"{self.subject or self.name}: {said}",)
            raise
        return Listing(
            str(info.sha),
            {
                each.rfilename: RemoteFile(
                    each.rfilename, int(each.size or 0), str(each.lfs.sha256 if each.lfs else each.blob_id or "")
                )
                for each in info.siblings or []
            },
            str(info.gated or ""),
        )

    def _cached_listing(self, revision: str | None) -> Listing:
        folder = Path(
            self._ask(
                lambda api: api.snapshot_download(
                    self.name, revision=revision, cache_dir=self.cache_dir, local_files_only=True
                ),
                f"{self.name} at {revision or 'main'}",
            )
        )
        paths = [path for path in folder.rglob("*") if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in paths]
        files = {name: RemoteFile(name, path.stat().st_size, "") for name, path in zip(names, paths, strict=True)}
        return Listing(folder.name, files, "")

    def pin(self, revision: str | None, names: Sequence[str]) -> Listing:
        """As `listing`, and the cache remembers which commit `revision` was, so that it can be found offline.

        For that the first of `names` that the repo has is fetched by the name of the revision.
        """
        found = self.listing(revision)
        first = next((name for name in names if name in found.files), None)
        if self.offline or first is None or (revision and _COMMIT.fullmatch(revision)):
            return found
        options = {"revision": revision, "cache_dir": self.cache_dir}
        path = self._ask(lambda api: api.hf_hub_download(self.name, first, **options))
        commit = Path(path).parents[first.count("/")].name
        return found if commit == found.commit else self.listing(commit)  # somebody has just pushed

    def fetch(
        self, listing: Listing, names: Iterable[str], *, force: bool = False, heed: Callable[[], None] = lambda: None
    ) -> Path:
        """Bring files into the cache, unless they are there; returns the folder of the snapshot.

        What is downloaded is compared with the Hub's digest, and thrown away when it differs. `heed` is asked meanwhile
        and raises when nobody wants the files any more; then, as after an error, no download is waited for.
        """
        names = sorted(set(names))
        with Crew(min(FETCHING, len(names)), "shardconv-fetch", heed=heed, patience_s=PATIENCE_S) as crew:
            paths = crew.results(
                [crew.submit(functools.partial(self._fetch_one, listing, name, force)) for name in names]
            )
        return paths[0].parents[names[0].count("/")]

    def cached(self, listing: Listing, name: str) -> Path | None:
        """Where a file is in the cache, at its full length."""
        import huggingface_hub

        path = huggingface_hub.try_to_load_from_cache(
            self.name, name, revision=listing.commit, cache_dir=self.cache_dir
        )
        known = listing.files.get(name)
        is_there = isinstance(path, str) and (
            known is None or not known.digest or Path(path).stat().st_size == known.nbytes
        )
        return Path(path) if is_there else None

    def _fetch_one(self, listing: Listing, name: str, force: bool) -> Path:
        """Bring one file into the cache. It is transferred when it is asked for by force, when the cache does not have
        its content, under whatever commit, or has it at another length; what was transferred is compared."""
        known, subject = listing.files.get(name), self._file(name)
        held = self._held_nbytes(known) if known else None
        is_whole = known is not None and held == known.nbytes
        forced = force or (held is not None and not is_whole) or self._is_short(listing, name)
        options: dict[str, Any] = {"revision": listing.commit, "cache_dir": self.cache_dir}
        options |= {"local_files_only": self.local_files_only}
        if forced and not self.offline:
            options |= {"force_download": True}
        is_new = forced or not (is_whole or self.cached(listing, name))
        path = Path(self._ask(lambda api: api.hf_hub_download(self.name, name, **options, **_bar(api)), subject))
        if is_new:
            _check_arrived(path, listing, name, subject)
        return path

    def _held_nbytes(self, file: RemoteFile) -> int | None:
        """The length at which the cache has this content, under whatever name; None when it does not have it, or when
        it is not known by its digest."""
        blobs = cache_folder(self.cache_dir) / f"models--{self.name.replace('/', '--')}" / "blobs"
        try:
            return (blobs / file.digest).stat().st_size if file.digest else None
        except OSError:
            return None

    def _is_short(self, listing: Listing, name: str) -> bool:
        """Whether the snapshot has the file, at another length than the Hub's."""
        import huggingface_hub

        path = huggingface_hub.try_to_load_from_cache(
            self.name, name, revision=listing.commit, cache_dir=self.cache_dir
        )
        return isinstance(path, str) and self.cached(listing, name) is None

    def download(self, listing: Listing, name: str, folder: Path) -> Path:
        """Bring a file to `folder`, not into the cache; one that is there already is looked at, not fetched again."""
        subject = self._file(name)
        options = {"revision": listing.commit, "local_dir": folder}
        path = Path(self._ask(lambda api: api.hf_hub_download(self.name, name, **options), subject))
        _check_arrived(path, listing, name, subject)
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

    # Writing

    def user(self) -> tuple[str, str]:
        """(name, role of the token: "write", "read", "fineGrained" or "")."""
        info = self._ask(lambda api: api.whoami())
        return str(info["name"]), str(info.get("auth", {}).get("accessToken", {}).get("role", ""))

    def check_write(self) -> None:
        """Raises when this token may not write to the repo (with a client that can ask)."""
        name, role = self.user()
        if role == "read":
            raise HubError(f"{self.name}: {name}'s token may only read; use one that may write: hf auth login")

        def check(api: Any) -> None:
            if "write" in inspect.signature(api.auth_check).parameters:
                api.auth_check(self.name, write=True)

        self._ask(check)

    def create(self, private: bool, gated: str) -> None:
        """Create the repo, empty; `gated` as in `Listing`."""
        self._ask(lambda api: api.create_repo(self.name, private=private, exist_ok=True))
        if gated:
            self.gate(gated)

    def gate(self, gated: str) -> None:
        """Have access to the repo asked for; `gated` as in `Listing`."""
        self._ask(lambda api: api.update_repo_settings(self.name, gated=gated))

    def create_branch(self, branch: str) -> None:
        """From the head of main."""
        self._ask(lambda api: api.create_branch(self.name, branch=branch, exist_ok=True))

    def upload(self, branch: str, names: Mapping[str, Path | bytes], new_pull: bool) -> list[Any]:
        """Send the large ones among files (name in the repo -> file here, or its content) that the Hub does not hold
        yet; nothing shows in the repo. Returns what `commit` takes.

        One after the other, so that those that arrived are not sent again after a failure.
        """
        import huggingface_hub

        def send(additions: list[Any]) -> None:
            options = {"revision": branch, "create_pr": new_pull, "free_memory": False}
            subject = f"{self.name}: {additions[0].path_in_repo}"
            self._ask(lambda api: api.preupload_lfs_files(self.name, additions, **options), subject)

        additions = [huggingface_hub.CommitOperationAdd(name, content) for name, content in names.items()]
        small = [each for each in additions if each.upload_info.size < SMALL_NBYTES]
        for batch in [small, *([each] for each in additions if each not in small)]:
            if batch:
                send(batch)
        return additions

    def commit(
        self, branch: str, parent: str, message: str, additions: Sequence[Any], deletions: Iterable[str], new_pull: bool
    ) -> tuple[str, str, str]:
        """One commit on top of `parent`, of files that were uploaded and of names to delete.

        Returns (commit, branch for further commits, URL of the commit or of the new pull request).
        """
        import huggingface_hub

        operations = [*additions, *(huggingface_hub.CommitOperationDelete(name, is_folder=False) for name in deletions)]
        info = self._ask(
            lambda api: api.create_commit(
                self.name,
                operations,
                commit_message=message,
                revision=branch,
                parent_commit=parent,
                create_pr=new_pull,
            )
        )
        return str(info.oid), str(info.pr_revision or branch), str(info.pr_url or info.commit_url)


def card_metadata(text: str) -> dict[str, Any]:
    """The front matter of a model card; empty when there is none that can be read."""
    import huggingface_hub

    try:
        return dict(huggingface_hub.ModelCard(text, ignore_metadata_errors=True).data.to_dict())
    except ValueError:
        return {}


def front_matter(metadata: Mapping[str, Any]) -> str:
    """The lines that a model card begins with."""
    import huggingface_hub

    return f"---\n{huggingface_hub.ModelCardData(**metadata).to_yaml()}\n---\n"


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


def _check_arrived(path: Path, listing: Listing, name: str, subject: str) -> None:
    """Throw a downloaded file away, and raise, when it is not what the Hub has."""
    expected = listing.files[name].digest if name in listing.files else ""
    if expected and digest_of(path, expected) != expected:
        discard(path)
        raise HubError(
            f"{subject}: arrived altered (its digest is not the Hub's) and was thrown away; run again, or fetch it "
            "afresh with force_download=True"
        )


def discard(path: Path) -> None:
    """Remove a file of the cache: its link in the snapshot and what the link leads to."""
    while path.is_symlink():
        target = path.parent / os.readlink(path)
        path.unlink(missing_ok=True)
        path = target
    path.unlink(missing_ok=True)
