"""Threads that move bytes for somebody who waits, and the one stop that ends them.

Other than those of `concurrent.futures` they are daemons: a slow disk, a slow network or a client that cannot be
interrupted keeps neither the caller from an error nor the interpreter from its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

POLL_S = 0.1  # the longest pause between two looks at whether the work is still wanted
PATIENCE_S = 0.5  # for threads that were told to stop, before they are left behind


class Stopped(Exception):
    """Ends work that nobody wants any more; never a reason to report."""


class _Stop:
    """Set once and for good; also when the `outer` one is."""

    def __init__(self, outer: _Stop | None) -> None:
        self._event = threading.Event()
        self._outer = outer

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set() or (self._outer is not None and self._outer.is_set())


_of_thread = threading.local()  # `stop`: that of the crew which the thread belongs to


def check_stop() -> None:
    """Raises `Stopped` when this thread is of a crew that was told to stop. To be called between pieces of work."""
    stop = getattr(_of_thread, "stop", None)
    if stop is not None and stop.is_set():
        raise Stopped


class Crew:
    """`num` threads that do what is submitted, in that order. A context manager.

    The first error stops the crew, and so does leaving the block, and the stop of the crew in one of whose threads this
    one is made: what has not begun is never done, and what has begun should `check_stop` often. Leaving waits for all
    threads; or with `patience_s` that long, and those that hang are left behind, with everything they hold.
    """

    def __init__(
        self, num: int, name: str, *, heed: Callable[[], None] = lambda: None, patience_s: float | None = None
    ) -> None:
        """`heed` is asked while somebody waits for a result, and raises when nobody wants it any more."""
        self._stop = _Stop(getattr(_of_thread, "stop", None))
        self._heed = heed
        self._patience_s = patience_s
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}_{i}", daemon=True) for i in range(num)]

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have a thread do `work`."""
        future: Future[T] = Future()
        self._jobs.put((future, work))
        return future

    def result(self, future: Future[T]) -> T:
        """What the work gave, or the error it ended with."""
        try:
            return self.results([future])[0]
        finally:
            del future  # see `results`

    def results(self, futures: Iterable[Future[T]]) -> list[T]:
        """What each gave, in order; the first error as soon as there is one."""
        futures = list(futures)
        while True:
            waiting = wait(futures, POLL_S, FIRST_EXCEPTION).not_done
            error = _first_error(futures)
            if error is not None:
                try:
                    raise error
                finally:
                    del error, futures, waiting  # or it would hold, by this frame, what holds it
            if not waiting:
                return [future.result() for future in futures]
            check_stop()
            self._heed()

    def _run(self) -> None:
        _of_thread.stop = self._stop
        while (job := self._jobs.get()) is not None:
            self._do(*job)
            del job  # what it gave belongs to others

    def _do(self, future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            check_stop()
            future.set_result(work())
        except BaseException as error:  # whoever waits gets it
            future.set_exception(error)
            self._stop.set()  # after that, so that nobody finds the others stopped and no reason
            del future

    def __enter__(self) -> Crew:
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._stop.set()
        for _ in self._threads:
            self._jobs.put(None)
        end = None if self._patience_s is None else time.monotonic() + self._patience_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if end is None else max(0.0, end - time.monotonic()))


def _first_error(futures: Iterable[Future[Any]]) -> BaseException | None:
    """Of those that are done, `Stopped` only for want of another."""
    errors = [error for future in futures if future.done() and (error := future.exception()) is not None]
    return min(errors, key=lambda error: isinstance(error, Stopped), default=None)


def stoppable(work: Callable[[], T], heed: Callable[[], None], name: str) -> T:
    """`work()` in a thread, while this one asks `heed`, which raises when nobody wants the result any more.

    What does not `check_stop` in time is left behind.
    """
    with Crew(1, name, heed=heed, patience_s=PATIENCE_S) as crew:
        return crew.result(crew.submit(work))
