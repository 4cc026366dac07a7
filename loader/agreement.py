"""Every rank learns what became of the others before any of them goes on.

Ranks answer through the key-value store of their process group. So no device takes part, a failure is heard while
others are still at work, and a rank that does not answer can be named. The first rank that knows enough writes the
verdict; all end by it, so that none returns while another raises.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from shardconv.errors import LoadError, ShardconvError

from .processes import has_ended, this_process
from .ranks import Ranks

T = TypeVar("T")

POLL_S = 0.05  # the longest pause between two looks at the store
OTHERS_S = 2.0  # from a first failure on, the time that others have to tell theirs
READ_S = 2.0  # the time that a rank stays for others to read the verdict: the store may be in its process
_COUNTER = "shardconv/exchanges of rank"


def together(ranks: Ranks, step: Callable[[], T]) -> list[Any]:
    """Run `step` here and on every other rank; what it gave, by rank: strings of all, other values of this one only.

    When it fails on any rank every rank raises: alone its own error, in a group a `LoadError` that names the ranks and
    their reasons, the same on all. So it does when a rank's process has ended, or when a rank has not answered
    `ranks.timeout_s` seconds after this one did. An interrupt or exit of this process is told to the others as well.
    """
    if ranks.group is None:
        return [step()]
    with _answering_store():
        exchange = _Exchange.begin(ranks)
    result, error = None, None
    try:
        result = step()
    except BaseException as raised:  # told to every rank, which raise it together
        error = raised
    with _answering_store():
        exchange.answer(result if isinstance(result, str) else None, _reasons(error))
        if error is not None and not isinstance(error, Exception):
            raise error
        told, issues = exchange.verdict()
    if issues:
        # A fault we know needs no second traceback; one we do not know does.
        raise LoadError(*issues) from (None if isinstance(error, (ShardconvError, _Abandoned)) else error)
    return [*told[: ranks.rank], result, *told[ranks.rank + 1 :]]


def heed(ranks: Ranks) -> None:
    """Inside a step of `together`: end it here when another rank has failed already, as what follows is for nothing."""
    if ranks.group is None:
        return
    with _answering_store():
        exchange = _Exchange.current(ranks)
        if exchange.store.check([exchange.key("failed")]):
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


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One call of `together`, which is the same one on all ranks as each of them counts its calls in the store."""

    ranks: Ranks
    store: Any  # a torch.distributed.Store
    number: int

    @classmethod
    def begin(cls, ranks: Ranks) -> _Exchange:
        exchange = cls.current(ranks, step=1)
        exchange.store.set(exchange.key(f"process {ranks.rank}"), this_process())
        return exchange

    @classmethod
    def current(cls, ranks: Ranks, step: int = 0) -> _Exchange:
        store = _get_process_group_store(ranks.group)
        return cls(ranks, store, store.add(f"{_COUNTER} {ranks.rank}", step))

    def key(self, what: object) -> str:
        return f"shardconv/{self.number}/{what}"

    def answer(self, told: str | None, reasons: Sequence[str]) -> None:
        """Tell the result of this rank, or for which reasons there is none."""
        self.store.set(self.key(self.ranks.rank), json.dumps([told, reasons]))
        if reasons:
            self.store.set(self.key("failed"), "")

    def verdict(self) -> tuple[list[str | None], list[str]]:
        """What each rank told, and the issues of all: read when somebody has written it, or written by this rank."""
        start = time.monotonic()
        failed_at = None
        while not self.store.check([self.key("verdict")]):
            now = time.monotonic()
            if failed_at is None and self.store.check([self.key("failed")]):
                failed_at = now
            silent = self._silent()
            blamed = {rank: why for rank in silent if (why := self._ended(rank))}
            if now - start > self.ranks.timeout_s:
                blamed = dict.fromkeys(silent, self._overdue()) | blamed
            if not silent or blamed or (failed_at is not None and now - failed_at > OTHERS_S):
                self._decide(blamed)
                continue
            time.sleep(min(POLL_S, 0.001 + (now - start) / 20))
        told, issues = json.loads(self.store.get(self.key("verdict")))
        with suppress(dist.DistError):  # all have read, and the process that keeps the store was quicker to leave
            self._leave()
        return told, issues

    def _silent(self) -> list[int]:
        return [rank for rank in range(self.ranks.size) if not self.store.check([self.key(rank)])]

    def _ended(self, rank: int) -> str | None:
        """The reason of a rank that cannot answer any more."""
        key = self.key(f"process {rank}")
        if not self.store.check([key]) or not has_ended(process := self.store.get(key).decode()):
            return None
        return f"its process ({process.split()[1]}) ended while it was loading; see its output, or was memory short?"

    def _overdue(self) -> str:
        return (
            f"no answer {self.ranks.timeout_s:g} s after another rank was done; see its output, or give it longer with "
            "timeout="
        )

    def _decide(self, blamed: dict[int, str]) -> None:
        """Write the verdict, unless another rank has: by the answers there are now, and `blamed` for want of one."""
        silent = self._silent()
        told: dict[int, str | None] = {}
        reasons = {rank: [why] for rank, why in blamed.items()}
        for rank in set(range(self.ranks.size)) - set(silent):
            told[rank], reasons[rank] = json.loads(self.store.get(self.key(rank)))
        issues = merged([reasons.get(rank, []) for rank in range(self.ranks.size)])
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
