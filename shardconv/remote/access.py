"""Who may read a repo: what is pushed must not be open to more people than the repo that its weights come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import HubError
from .hub import Repo
from .publish import WritableRepo
from .store import Listing

EVERYBODY, WHO_ACCEPTS, WHO_IS_LET_IN = range(3)  # who reads it: all, those who accept its terms, those whom it chooses

SAYING_NOTHING = {"README.md", ".gitattributes"}  # files of a repo that holds nothing yet


@dataclass(frozen=True, slots=True)
class Access:
    """To one repo."""

    gated: str  # "auto", "manual", or ""
    private: bool

    @property
    def readers(self) -> int:
        """The more, the fewer: `EVERYBODY` to `WHO_IS_LET_IN`."""
        if self.private or self.gated not in ("", "auto"):  # a kind of gate that is not known is none that is open
            return WHO_IS_LET_IN
        return WHO_ACCEPTS if self.gated else EVERYBODY

    def __str__(self) -> str:
        return "private" if self.private else f"gated ({self.gated})" if self.gated else "open"


@dataclass(frozen=True, slots=True)
class Owed:
    """What access to a source asks of the repo that its weights go to."""

    source: str  # name of the repo
    access: Access | None  # None: it cannot be learned
    why: str = ""  # it cannot

    @property
    def readers(self) -> int:
        """As of an access; where it cannot be learned, the fewest."""
        return self.access.readers if self.access else WHO_IS_LET_IN


def owed_to_sources(repo: Repo, there: Listing | None, sources: Iterable[str], private: bool) -> list[Owed]:
    """What the repos `sources`, which weights come from, ask of `repo`, found as `there` (None: it will be made, so
    `private`).

    Raises `HubError` when it is, or would be, open to more people than they are, and when that cannot be known: weights
    in the open do not come back.
    """
    owed = [_ask(name, repo.token) for name in sorted(set(sources) - {repo.name})]
    access = _access_to(there) if there else Access(_gate_for(owed), private)
    if there and set(there.files) <= SAYING_NOTHING and access.readers < Access(_gate_for(owed), False).readers:
        access = Access(_gate_for(owed), access.private)  # as `make_ready` will have it
    _check(repo.name, access, owed, there is not None)
    return owed


def make_ready(repo: WritableRepo, there: Listing | None, owed: Sequence[Owed], private: bool) -> None:
    """Make the repo, or the one that shows nothing yet, ready to be sent to: closed as it must be, then looked at."""
    gate = _gate_for(owed)
    if there and _access_to(there).readers >= Access(gate, False).readers:
        return
    if there is None:
        repo.create(private)
    try:
        if gate:
            repo.gate(gate)
        access = _access_to(repo.listing(None))
        _check(repo.name, access, owed, exists=True)
        if there is None and private and not access.private:
            raise HubError(f"{repo.name}: expected it to be private, found it open; somebody else made it, look at it")
    except HubError as error:
        made = "created, " if there is None else ""
        raise error.reworded(lambda issue: f"{issue} ({made}nothing was sent; push again to go on)") from None


def _access_to(listing: Listing) -> Access:
    """Of a repo that is pushed to; what its answer does not tell counts as open."""
    return Access(listing.gated or "", listing.private)


def _ask(name: str, token: str | bool | None) -> Owed:
    try:
        listing = Repo(name, token).listing(None)
    except HubError as error:
        return Owed(name, None, str(error))
    if listing.gated is None:
        return Owed(name, None, f"{name}: the answer does not say whether it is gated")
    return Owed(name, Access(listing.gated, listing.private))


def _gate_for(owed: Iterable[Owed]) -> str:
    """The gate that a new repo must get."""
    gates = {each.access.gated for each in owed if each.access and each.access.gated}
    return "" if not gates else "auto" if gates == {"auto"} else "manual"


def _check(target: str, access: Access, owed: Iterable[Owed], exists: bool) -> None:
    """Raises `HubError` when `target`, which has or would get this access, is open to more people than a source."""
    issues = [
        f"{target}: access to it {'is' if exists else 'would be'} {access}, {_sentence(each)}; "
        f"{_step(target, each, exists)}"
        for each in owed
        if access.readers < each.readers
    ]
    if issues:
        raise HubError(*issues)


def _sentence(owed: Owed) -> str:
    if owed.access:
        return f"to {owed.source}, which its weights come from, it is {owed.access}"
    return f"whether access to {owed.source}, which its weights come from, is gated cannot be known ({owed.why})"


def _step(target: str, owed: Owed, exists: bool) -> str:
    """What to do, nothing having been sent."""
    private = "make it private in its settings" if exists else "add --private"
    if owed.access and owed.access.private:
        return private
    if owed.access:
        return f"gate {target} alike in its settings, or {private}"
    return f"log in with an account that sees it, or gate {target} by hand (manual) in its settings, or {private}"
