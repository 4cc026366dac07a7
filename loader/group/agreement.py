"""Every rank learns what became of the others before any of them goes on.

Ranks answer through the key-value store of their process group. So no device takes part, a failure is heard while
others are still at work, and a rank that does not answer can be named. The first rank that knows enough writes the
verdict; all end by it, so that none returns while another raises.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from shardconv.errors import LoadError, ShardconvError
from shardconv.libraries.torch_private import store_of

from .processes import has_ended, this_process
from .ranks import Ranks

T = TypeVar("T")

POLL_S = 0.05  # the longest pause between two looks at the store
OTHERS_S = 2.0  # from a first failure on, the time that others have to tell theirs
LOOK_S = 0.5  # the shortest pause between two looks at the processes of the others from within a step
READ_S = 2.0  # the time that a rank stays for others to read the verdict: the store may be in its process
_COUNTER = "shardconv/calls of rank"


@contextmanager
def one_call(ranks: Ranks, what: str) -> Iterator[None]:
    """`what`, a call of this package on a group, in which `agree` and `exchange` are used any number of times, alike on
    all ranks.

    Ranks count their calls, so a group is in one at a time: raises `LoadError` when another thread of this process is
    in one, and has the ranks that make this one raise it too. A call within one of the same thread is a part of it.
    """
    if ranks.group is None or _own_call(ranks) is not None:
        yield
        return
    key = ranks.group_name, threading.get_ident()
    with _answering_store(), _CALLS_LOCK:
        call = _Call.begin(ranks, what)
        others = [each for (group, _), each in _calls.items() if group == ranks.group_name and ranks.size > 1]
        if not others:
            _calls[key] = call
    try:
        if others:
            raise _refused(ranks, call, others[0])
        yield
    finally:
        _calls.pop(key, None)
        with suppress(dist.DistError):
            call.leave()


def _refused(ranks: Ranks, call: _Call, other: _Call) -> LoadError:
    error = LoadError(
        f"group: {call.what} was called while another thread of this process is in {other.what} with the same group; "
        "make one call after the other, or give each thread a group of its own (torch.distributed.new_group)"
    )
    with _answering_store():
        _Exchange(ranks, call).give_up(error.issues)
    return error


def agree(ranks: Ranks, step: Callable[[], T], what: str = "a call") -> T:
    """Run `step` here and on every other rank, and wait until all are done with it; what it gave here.

    When it fails on any rank every rank raises: alone its own error, in a group a `LoadError` that names the ranks and
    their reasons, the same on all. So it does when a rank's process has ended, when ranks are in different calls, or
    when one has not answered `ranks.timeout_s` seconds after this one did. An interrupt or exit of this process is told
    to the others as well. Outside of `one_call` it is one, of the name `what`.
    """
    if ranks.group is None:
        return step()
    with one_call(ranks, what):
        return _meet(ranks, step, lambda result: None)[0]


def exchange(ranks: Ranks, step: Callable[[], str], what: str = "a call") -> list[str]:
    """As `agree`; what `step` gave on every rank, by rank."""
    if ranks.group is None:
        return [step()]
    with one_call(ranks, what):
        return [str(each) for each in _meet(ranks, step, lambda result: result)[1]]


def _meet(ranks: Ranks, step: Callable[[], T], tell: Callable[[T], str | None]) -> tuple[T, list[str | None]]:
    """The result of this rank, and what every rank tells of its own."""
    meeting = _Exchange.begin(ranks)
    result, error = None, None
    try:
        result = step()
    except BaseException as raised:  # told to every rank, which raise it together
        error = raised
    with _answering_store():
        try:
            if error is not None and not isinstance(error, Exception):
                raise error
            meeting.answer(None if result is None else tell(result), _reasons(error))
            told, issues = meeting.verdict()
        except Exception:
            raise
        except BaseException as raised:  # also one that comes while this rank waits for the others
            with suppress(dist.DistError):
                meeting.give_up(_reasons(raised))
            raise
    if issues:
        # A fault we know needs no second traceback; one we do not know does.
        raise LoadError(*issues) from (None if isinstance(error, (ShardconvError, _Abandoned)) else error)
    return cast(T, result), told


def heed(ranks: Ranks) -> None:
    """Inside a step of `agree` or `exchange`: end it here when another rank has failed already, or its process has
    ended, as what follows is for nothing. To be called often."""
    call = _own_call(ranks) if ranks.group is not None else None
    if call is None:
        return
    with _answering_store():
        meeting = _Exchange(ranks, call)
        if call.store.check([meeting.key("failed")]):
            raise _Abandoned
        if time.monotonic() > call.look_at:
            call.look_at = time.monotonic() + LOOK_S
            if any(meeting.trouble()):
                raise _Abandoned


class _Abandoned(Exception):
    """Another rank has failed; no reason of this one."""


@contextmanager
def _answering_store() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise LoadError(
            f"process group: its store does not answer any more ({error}); the process that keeps it, as a rule that "
            "of rank 0, has ended, see its output"
        ) from None


@dataclass(slots=True)
class _Call:
    """One call of this rank on a group. Its number is that of the same call on other ranks, as all count."""

    store: Any  # a torch.distributed.Store
    rank: int
    number: int
    what: str
    step: int = -1  # that it is in, from 0
    look_at: float = 0.0  # when `heed` may look at the processes of the others, by `time.monotonic`

    @classmethod
    def begin(cls, ranks: Ranks, what: str) -> _Call:
        store = store_of(ranks.group)
        number = store.add(f"{_COUNTER} {ranks.rank}", 1)
        call = cls(store, ranks.rank, number, what)
        store.set(_process_key(ranks.rank), this_process())
        store.set(call.key(f"call {ranks.rank}"), what)
        return call

    def key(self, what: object) -> str:
        return f"shardconv/{self.number}/{what}"

    def leave(self) -> None:
        self.store.set(self.key(f"left {self.rank}"), "")


def _process_key(rank: int) -> str:
    """Of the whole group, so that one which ended between two calls is known too."""
    return f"shardconv/process {rank}"


_calls: dict[tuple[str, int], _Call] = {}  # that this process is in, by name of the group and thread
_CALLS_LOCK = threading.Lock()


def _own_call(ranks: Ranks) -> _Call | None:
    """The call that this thread is in."""
    return _calls.get((ranks.group_name, threading.get_ident()))


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One use of `together`: a step of a call."""

    ranks: Ranks
    call: _Call

    @classmethod
    def begin(cls, ranks: Ranks) -> _Exchange:
        """The next one of this thread's call."""
        call = _calls[ranks.group_name, threading.get_ident()]
        call.step += 1
        return cls(ranks, call)

    @property
    def store(self) -> Any:
        return self.call.store

    def key(self, what: object) -> str:
        return self.call.key(f"{max(0, self.call.step)}/{what}")

    def answer(self, told: str | None, reasons: Sequence[str]) -> None:
        """Tell the result of this rank, or for which reasons there is none."""
        self.store.set(self.key(self.ranks.rank), json.dumps([told, reasons]))
        if reasons:
            self.store.set(self.key("failed"), "")

    def give_up(self, reasons: Sequence[str]) -> None:
        """Tell why this rank takes no part any more; it will not read the verdict, so nobody need wait for that."""
        self.answer(None, reasons)
        self.store.add(self.key("read"), 1)

    def verdict(self) -> tuple[list[str | None], list[str]]:
        """What each rank told, and the issues of all: read when somebody has written it, or written by this rank."""
        start = time.monotonic()
        failed_at = None
        while not self.store.check([self.key("verdict")]):
            now = time.monotonic()
            if failed_at is None and self.store.check([self.key("failed")]):
                failed_at = now
            silent = self._silent()
            blamed, mixed = self.trouble()
            if now - start > self.ranks.timeout_s:
                blamed = dict.fromkeys(silent, self._overdue()) | blamed
            if not silent or blamed or mixed or (failed_at is not None and now - failed_at > OTHERS_S):
                self._decide(blamed, mixed)
                continue
            time.sleep(min(POLL_S, 0.001 + (now - start) / 20))
        told, issues = json.loads(self.store.get(self.key("verdict")))
        with suppress(dist.DistError):  # all have read, and the process that keeps the store was quicker to leave
            self._leave()
        return told, issues

    def _silent(self) -> list[int]:
        return [rank for rank in range(self.ranks.size) if not self.store.check([self.key(rank)])]

    def trouble(self) -> tuple[dict[int, str], list[str]]:
        """Why this exchange will fail, as far as can be known before all have answered: reasons of ranks that never
        will, by rank, and an issue when ranks are in different calls."""
        lost = {rank: why for rank in self._silent() if (why := self._lost(rank))}
        calls = {rank: self._known(self.call.key(f"call {rank}")) for rank in range(self.ranks.size)}
        if len(set(calls.values()) - {None}) == 1:
            return lost, []
        where = ", ".join(f"rank {rank} in {what}" for rank, what in calls.items() if what)
        return lost, [f"the ranks are in different calls, {where}; have all make the same calls in one order"]

    def _lost(self, rank: int) -> str | None:
        """The reason of a silent rank that will not answer any more."""
        if self._known(self.call.key(f"left {rank}")) is not None:
            return f"left {self.call.what} before this step; see its output, and have all ranks make the same calls"
        process = self._known(_process_key(rank))
        if process and has_ended(process):
            pid = process.split()[1]
            return f"its process ({pid}) ended while it was loading; see its output, or was memory short?"
        return None

    def _known(self, key: str) -> str | None:
        """What a rank has told already."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _overdue(self) -> str:
        return (
            f"no answer {self.ranks.timeout_s:g} s after another rank was done; see its output, or give it longer with "
            "timeout="
        )

    def _decide(self, blamed: dict[int, str], mixed: list[str]) -> None:
        """Write the verdict, unless another rank has: by the answers there are now, `blamed` for want of one, and
        `mixed`."""
        silent = self._silent()
        told: dict[int, str | None] = {}
        reasons = {rank: [why] for rank, why in blamed.items()}
        for rank in set(range(self.ranks.size)) - set(silent):
            told[rank], reasons[rank] = json.loads(self.store.get(self.key(rank)))
        issues = merged([reasons.get(rank, []) for rank in range(self.ranks.size)]) + mixed
        if issues or not silent:  # else a blamed rank has answered in the meantime, and others are still at work
            verdict = [[told.get(rank) for rank in range(self.ranks.size)], issues]
            self.store.compare_set(self.key("verdict"), "", json.dumps(verdict))

    def _leave(self) -> None:
        """Stay until all that answered have read the verdict, `READ_S` at most."""
        key, end = self.key("read"), time.monotonic() + READ_S
        answered = self.ranks.size - len(self._silent())
        read = self.store.add(key, 1)
        while read < answered and time.monotonic() < end:
            time.sleep(0.002)
            read = self.store.add(key, 0)


def merged(reasons: Sequence[Sequence[str]]) -> list[str]:
    """Issues from the reasons by rank: each with its rank, one line for what every rank has."""
    if all(each == reasons[0] for each in reasons):
        return [f"every rank: {reason}" for reason in reasons[0]]
    return [f"rank {rank}: {reason}" for rank, each in enumerate(reasons) for reason in each]


def _reasons(error: BaseException | None) -> tuple[str, ...]:
    if error is None or isinstance(error, _Abandoned):
        return ()
    if isinstance(error, ShardconvError):
        return error.issues
    return (f"{type(error).__name__}: {error}",)
