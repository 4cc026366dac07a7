"""`shardconv push` as a library call: verified sets -> what differs from the repo -> commits, no set divided."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from .._version import __version__
from ..errors import HubError, Interrupted, SetError, UsageError
from ..format.manifest import Manifest
from ..format.names import CONFIG_NAME, MANIFEST_NAME, MODEL_INDEX, is_set_file
from ..remote import card
from ..remote.access import make_ready, owed_to_sources
from ..remote.choose import is_store_name
from ..remote.hub import Repo
from ..remote.hub_cache import digest_of
from ..remote.publish import WritableRepo, card_metadata, front_matter
from ..remote.store import Listing, RemoteFile, degrees_in
from ..remote.tokens import usable_token
from ..system.cores import usable_cores
from ..system.crew import PATIENCE_S, Crew
from ..system.progress import NewProgress
from .sendable import Sendable, SendableSet, sendable
from .verify import verify

CARD = "README.md"
MAX_FILE_NBYTES = 500 * 1000**3  # the Hub takes no larger file
COMMIT_FILES = 100  # what the Hub advises; one set is never divided
EMPTY = Listing("", {})


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push did, or in a dry run would do."""

    repo: str
    url: str  # of the last commit or the pull request; "" when nothing was sent
    created: bool  # the repo
    sets: tuple[str, ...]  # folders in the repo
    sent: Mapping[str, int]  # name in the repo -> bytes
    deleted: tuple[str, ...]  # names in the repo


@dataclass(slots=True)
class _Unit:
    """Changes that belong in one commit."""

    add: dict[str, Path | bytes] = field(default_factory=dict)
    delete: list[str] = field(default_factory=list)


def push(
    out: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    degrees: Collection[int] | None = None,
    commit_message: str | None = None,
    dry_run: bool = False,
    token: str | bool | None = None,
    new_progress: NewProgress = lambda what, total: lambda nbytes: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Pushed:
    """Publish the sets of `out` (what `convert` wrote) in a Hub repo: verified byte for byte, each in one commit.

    Only files that the manifests list are sent, with configs, licences, the other components of a pipeline and a card.

    Args:
        private: of a repo that has to be created.
        revision: the branch, created if need be, or a pull request to go on with, `refs/pr/N`; None is main.
        create_pr: open a pull request instead of committing; needs no write access.
        degrees: only the sets of these tp degrees.
        dry_run: send nothing, create nothing.
        token: of the Hub; None is the one of `hf auth login` or HF_TOKEN.
        new_progress: gives for (what, total bytes) a function that is called with bytes just verified.
        tell: called with sentences about what is done.

    Raises:
        UsageError, SetError: before anything is sent; HubError then, when the repo is open to more people than its
            source or that cannot be known; and when the Hub fails: what was uploaded is not sent again by another push.
    """
    repo = _repo(repo_id, token, revision, create_pr)
    local = _verified(Path(out), degrees, new_progress, tell)
    if repo.offline:
        raise HubError(f"{repo_id}: HF_HUB_OFFLINE is set, so nothing can be sent; unset it")
    state, branch_state = _states(repo, revision)
    if state and not create_pr and not (revision or "").startswith("refs/pr/"):  # a pull request is its author's
        repo.check_write()
    elif not state:
        _check_may_create(repo)
    sources = {each.manifest.source.repo for each in local.sets if each.manifest.source.repo}
    owed = owed_to_sources(repo, state, sources, private)
    remote = branch_state or state or EMPTY
    units = _changes(Path(out), local, repo, remote, tell)
    sent = {name: _nbytes(content) for unit in units for name, content in unit.add.items()}
    deleted = tuple(name for unit in units for name in unit.delete)
    report = Pushed(repo_id, "", state is None, tuple(each.name for each in local.sets), sent, deleted)
    if dry_run or (not units and (branch_state or create_pr)):
        return report
    message = commit_message or f"Add {', '.join(report.sets)} (shardconv {__version__})"
    made: list[str] = []
    try:
        make_ready(repo, state, owed, private)
        if branch_state is None and revision:
            repo.create_branch(revision)
        return replace(report, url=_send(repo, revision or "main", units, message, create_pr, tell, made))
    except KeyboardInterrupt:
        where = "the pull request" if create_pr else revision or "main"
        raise Interrupted(_what_stands(report, where, made, len(units))) from None


def _repo(repo_id: str, token: str | bool | None, revision: str | None, create_pr: bool) -> WritableRepo:
    if not is_store_name(repo_id):
        raise UsageError(f"{repo_id}: expected a repo such as org/name")
    if create_pr and revision:
        raise UsageError("--create-pr: goes to main, --revision to a branch; give one of them")
    if usable_token(token) is False:
        raise UsageError("token: False sends none, and without one nothing can be pushed; leave it out, or give one")
    return WritableRepo(repo_id, token)


def _verified(
    out: Path, degrees: Collection[int] | None, new_progress: NewProgress, tell: Callable[[str], None]
) -> Sendable:
    """What can be sent of `out`, every byte of its sets compared with the manifests."""
    local = sendable(out, degrees)
    _check_sizes(local)
    for found in [each for place in local.sets for each in verify(place.folder, new_progress=new_progress)]:
        if found.ignored:
            tell(f"{found.path}: {', '.join(found.ignored)} not sent, hidden files are no part of a set")
    return local


def _nbytes(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _check_sizes(local: Sendable) -> None:
    files = {**local.others, **{name: path for each in local.sets for name, path in each.files().items()}}
    large = {name: path.stat().st_size for name, path in files.items() if path.exists()}
    issues = [
        f"{name}: {nbytes:,} bytes, the Hub takes files of at most {MAX_FILE_NBYTES:,}; convert for a higher tp degree"
        for name, nbytes in large.items()
        if nbytes > MAX_FILE_NBYTES
    ]
    if issues:
        raise SetError(*issues)


def _states(repo: WritableRepo, revision: str | None) -> tuple[Listing | None, Listing | None]:
    """Main and the branch to push to, as they are; None for what does not exist."""
    try:
        main = repo.listing(None)
    except HubError as error:
        if error.kind != "no repo":
            raise
        return None, None
    if not revision:
        return main, main
    try:
        return main, repo.listing(revision)
    except HubError as error:
        if error.kind != "no revision":
            raise
        return main, None


def _check_may_create(repo: WritableRepo) -> None:
    name, role = repo.user()
    if role == "read":
        raise HubError(f"{repo.name}: {name}'s token may only read; use one that may write: hf auth login")


def _changes(
    out: Path, local: Sendable, repo: WritableRepo, remote: Listing, tell: Callable[[str], None]
) -> list[_Unit]:
    """What differs from the repo, in the order of sending."""
    config_names = {f"{each.component}/{CONFIG_NAME}".lstrip("/") for each in local.sets}
    rest = {name: path for name, path in local.others.items() if name not in config_names}
    units = [_Unit({name: path}) for name, path in _differing(rest, remote).items()]
    others: dict[str, dict[int, Manifest]] = {}
    for component in dict.fromkeys(each.component for each in local.sets):
        sets = [each for each in local.sets if each.component == component]
        config = f"{component}/{CONFIG_NAME}".lstrip("/")
        changed = _differing({config: local.others[config]}, remote)
        others[component] = _strangers(repo, remote, component, sets, bool(changed) and config in remote.files)
        own = [_set_unit(each, remote) for each in sets]
        if changed and config in remote.files:  # the sets that are there go with the config that is there
            own = [_merged([_Unit(dict(changed)), *own])]
        elif changed:
            own.insert(0, _Unit(dict(changed)))
        units += own
    text = _card(out, local, repo, remote, _rows(local, repo, remote, others, tell))
    if text is not None:
        units.append(_Unit({CARD: text}))
    return _packed([unit for unit in units if unit.add or unit.delete])


def _differing(files: Mapping[str, Path], remote: Listing) -> dict[str, Path]:
    """Those that the repo does not hold as they are here."""

    def differs(name: str) -> bool:
        known, path = remote.files.get(name), files[name]
        return known is None or known.nbytes != path.stat().st_size or known.digest != digest_of(path, known.digest)

    with Crew(usable_cores(), "shardconv-digest", patience_s=PATIENCE_S) as crew:
        found = crew.results([crew.submit(partial(differs, name)) for name in files])
    return {name: files[name] for name, is_other in zip(files, found, strict=True) if is_other}


def _set_unit(each: SendableSet, remote: Listing) -> _Unit:
    files = each.files()
    stale = [name for name in _set_files(remote, each.name) if name not in files]
    return _Unit(dict(_differing(files, remote)), stale)


def _set_files(remote: Listing, folder: str) -> dict[str, RemoteFile]:
    """The files of a set in the repo, by name in the repo."""
    return {
        name: file
        for name, file in remote.files.items()
        if name.rpartition("/")[0] == folder and is_set_file(name.rpartition("/")[2])
    }


def _strangers(
    repo: WritableRepo, remote: Listing, component: str, sets: Sequence[SendableSet], config_changed: bool
) -> dict[int, Manifest]:
    """The repo's other sets of a component, by degree; they must be of the same weights and config, as on disk."""
    ours, issues = {each.manifest.tp_degree for each in sets}, []
    others = {
        degree: _manifest_there(repo, remote, f"{folder}/{MANIFEST_NAME}")
        for degree, folder in degrees_in(remote, component).items()
        if degree not in ours
    }
    for degree, there in others.items():
        if config_changed or not there.source.same_weights(sets[0].manifest.source):
            issues.append(
                f"{repo.name}: {degrees_in(remote, component)[degree]} is of other weights or another config than what "
                f"is pushed; push to another repo, or convert and push degree {degree} along"
            )
    if issues:
        raise SetError(*issues)
    return others


def _manifest_there(repo: WritableRepo, remote: Listing, name: str) -> Manifest:
    try:
        return Manifest.parse(repo.read(remote, name), f"{repo.name}: {name}")
    except SetError as error:
        raise error.reworded(_for_owner) from None


def _for_owner(issue: str) -> str:
    """A fault of a manifest in a repo, with what its owner can do about it."""
    fault, _, step = issue.rpartition("; ")
    return f"{fault}; push that set again, or remove it from the repo" if step.endswith("again") else issue


def _is_whole(there: Manifest, remote: Listing, folder: str) -> bool:
    """Whether a repo has every file of a set, at its length."""
    held = {name.rpartition("/")[2]: file.nbytes for name, file in _set_files(remote, folder).items()}
    named = there.tp_degree == int(folder.rpartition("tp")[2])
    return named and all(held.get(file.name) == file.nbytes for file in there.files)


def _merged(units: Iterable[_Unit]) -> _Unit:
    whole = _Unit()
    for unit in units:
        whole.add |= unit.add
        whole.delete += unit.delete
    return whole


def _packed(units: Iterable[_Unit]) -> list[_Unit]:
    """As few commits as the Hub's advice allows, no unit divided."""
    packed: list[_Unit] = []
    for unit in units:
        if packed and len(packed[-1].add) + len(unit.add) <= COMMIT_FILES:
            packed[-1] = _merged([packed[-1], unit])
        else:
            packed.append(unit)
    return packed


def _card(out: Path, local: Sendable, repo: WritableRepo, remote: Listing, rows: Sequence[card.SetRow]) -> bytes | None:
    """The model card as it should be; None when the repo's is so already."""
    section = card.section(repo.name, rows, MODEL_INDEX in local.others)
    if CARD in remote.files:
        old = _text(repo.read(remote, CARD), f"{repo.name}: {CARD}")
        text = card.updated(old, section)
        return None if text == old else text.encode()
    here = _text((out / CARD).read_bytes(), str(out / CARD)) if (out / CARD).is_file() else ""
    if card.BEGIN in here:
        return card.updated(here, section).encode()
    manifest = local.sets[0].manifest
    base = manifest.source.repo if manifest.source.repo != repo.name else None
    about = here or _source_card(manifest, repo.token)
    source = card_metadata(about) if about else {}
    front = front_matter(card.metadata(base, source))
    return card.new(front, repo.name, base, manifest.cast_to, section).encode()


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise SetError(f"{where}: expected text in UTF-8, found another encoding; save it as UTF-8") from None


def _rows(
    local: Sendable,
    repo: WritableRepo,
    remote: Listing,
    others: Mapping[str, Mapping[int, Manifest]],
    tell: Callable[[str], None],
) -> list[card.SetRow]:
    """Every set that the repo will hold, whole; `others` are those that are not pushed."""
    rows = [_row(each.component, each.manifest) for each in local.sets]
    for component, there in others.items():
        for degree, folder in degrees_in(remote, component).items():
            if degree in there and _is_whole(there[degree], remote, folder):
                rows.append(_row(component, there[degree]))
            elif degree in there:
                tell(f"{repo.name}: {folder} lacks rank files, nobody can load it; push that degree, or remove it")
    return rows


def _row(component: str, manifest: Manifest) -> card.SetRow:
    shared = sum(file.nbytes for file in manifest.files if file.rank is None)
    own = max(file.nbytes for file in manifest.files if file.rank is not None)
    return card.SetRow(component, manifest.tp_degree, sum(file.nbytes for file in manifest.files), shared + own)


def _source_card(manifest: Manifest, token: str | bool | None) -> str:
    """The card of the repo that was converted; "" when it cannot be had."""
    if not manifest.source.repo:
        return ""
    source = Repo(manifest.source.repo, token)
    try:
        return source.read(source.listing(manifest.source.revision), CARD).decode()
    except (HubError, KeyError, UnicodeDecodeError):
        return ""


def _send(
    repo: WritableRepo,
    branch: str,
    units: Iterable[_Unit],
    message: str,
    new_pull: bool,
    tell: Callable[[str], None],
    made: list[str],
) -> str:
    """Upload and commit; returns the URL of the last commit or of the pull request. Adds the URLs to `made`."""
    is_pull = new_pull
    parent = repo.listing(branch).commit
    for unit in units:
        tell(f"sending {len(unit.add)} files to {repo.name}, {sum(map(_nbytes, unit.add.values())):,} bytes at most")
        parent, branch, url = _send_unit(repo, branch, parent, unit, message, new_pull)
        made.append(url)
        new_pull = False
    return (made[0] if is_pull else next(filter(None, reversed(made)), "")) if made else ""


def _send_unit(
    repo: WritableRepo, branch: str, parent: str, unit: _Unit, message: str, new_pull: bool
) -> tuple[str, str, str]:
    """One commit on top of `parent`; as `WritableRepo.commit` gives it, the URL "" when its answer was lost."""
    additions = repo.upload(branch, unit.add, new_pull)
    try:
        return repo.commit(branch, parent, message, additions, unit.delete, new_pull)
    except HubError:
        now = repo.listing(branch)
        if new_pull or now.commit == parent or not _is_done(unit, now):
            raise
        return now.commit, branch, ""  # the commit was made, only its answer was lost


def _what_stands(report: Pushed, branch: str, made: Sequence[str], num: int) -> str:
    """What somebody must know who ends a push by Ctrl-C after `made` (URLs) of `num` commits. The one under way may
    have been made as well; asking could take as long as what was just ended."""
    where = f"{report.repo}: {branch}"
    if not made:
        empty = "; the repo itself may be there, empty" if report.created else ""
        return f"{where} shows nothing of it yet, unless the commit under way was made; push again to go on{empty}"
    urls = ", ".join(filter(None, made))
    return f"{where} has {len(made)} of {num} commits ({urls}), each whole, maybe the next too; push again for the rest"


def _is_done(unit: _Unit, now: Listing) -> bool:
    files = {name: content for name, content in unit.add.items() if isinstance(content, Path)}
    return not _differing(files, now) and not set(unit.delete) & set(now.files)
