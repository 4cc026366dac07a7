"""Threads that move bytes end when nobody wants their work any more, and keep nobody waiting."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from shardconv.system.crew import Crew, Stopped, check_stop, stoppable

SOON = 3  # seconds


class Unwanted(Exception):
    """Nobody wants the work."""


def work_on() -> None:
    """Small pieces of work without end."""
    while True:
        check_stop()
        time.sleep(0.001)


@pytest.fixture
def hang() -> Iterator[Callable[[], None]]:
    """Work that looks at nothing, as a read of a disk that went away, until the test is over."""
    over = threading.Event()
    yield lambda: over.wait(30) and None
    over.set()


def names(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


def test_results_come_in_order_and_no_thread_stays() -> None:
    """As many threads as were asked for do what is submitted; what each gave comes in the order of the asking."""
    meeting = threading.Barrier(3, timeout=10)
    with Crew(3, "three") as crew:
        found = crew.results(
            [crew.submit(lambda position=position: (meeting.wait(), position)[1]) for position in range(6)]
        )
        assert len(names("three")) == 3
    assert found == list(range(6))
    assert names("three") == []


def test_the_first_error_ends_the_others_and_is_raised() -> None:
    """An error is raised as it is and at once, though work that was submitted earlier would go on for ever."""
    error = ValueError("broken")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="broken") as caught, Crew(3, "failing") as crew:
        crew.results([crew.submit(work_on), crew.submit(fail), crew.submit(work_on)])
    assert caught.value is error
    assert names("failing") == []


def test_what_has_not_begun_is_not_done() -> None:
    """After an error the work that waits for a thread is left."""
    done = []

    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), Crew(1, "one") as crew:
        crew.results([crew.submit(fail), crew.submit(lambda: done.append(1))])
    assert done == []


def test_leaving_ends_what_goes_on() -> None:
    """Whoever leaves, with an error or without, ends the work."""
    with Crew(2, "left") as crew:
        pending = crew.submit(work_on)
    assert names("left") == []
    assert isinstance(pending.exception(0), Stopped)


@pytest.mark.slow
def test_who_waits_hears_that_nobody_wants_it() -> None:
    """What `heed` raises ends the waiting and the work, at any depth."""
    calls = []

    def heed() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise Unwanted

    def inside() -> None:
        with Crew(2, "inner") as crew:
            crew.results([crew.submit(work_on) for _ in range(2)])

    with pytest.raises(Unwanted):
        stoppable(inside, heed, "outer")
    assert names("inner") + names("outer") == []


@pytest.mark.slow
def test_what_hangs_is_left_behind(hang: Callable[[], None]) -> None:
    """Work that looks at nothing is not waited for, neither by the one who left nor through crews within it."""

    def inside() -> None:
        with Crew(1, "hanging") as crew:
            crew.result(crew.submit(hang))

    def heed() -> None:
        raise Unwanted

    start = time.monotonic()
    with pytest.raises(Unwanted):
        stoppable(inside, heed, "waiting")
    assert time.monotonic() - start < SOON
    assert len(names("hanging")) == 1


def test_outside_of_a_crew_nothing_stops() -> None:
    """The same code runs without a crew."""
    check_stop()
    assert stoppable(lambda: 7, lambda: None, "seven") == 7


def test_results_and_errors_are_not_kept() -> None:
    """What work gave, or held when it failed, goes with whoever has it, not with the garbage collector."""

    class Tensor:
        pass

    kept: list[weakref.ref[Tensor]] = []

    def give() -> Tensor:
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        return tensor

    def fail() -> None:
        tensor = give()
        raise ValueError(f"with {tensor}")

    gc.disable()
    try:
        with Crew(1, "giving") as crew:
            assert isinstance(crew.result(crew.submit(give)), Tensor)
            assert kept[0]() is None
            with pytest.raises(ValueError, match="with"):
                crew.result(crew.submit(fail))
            assert kept[1]() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_the_interpreter_does_not_wait_at_its_end() -> None:
    """A process that was told to end does so although a thread of a crew hangs."""
    code = """
from shardconv.system.crew import stoppable
import time
def heed():
    raise SystemExit("not wanted")
stoppable(lambda: time.sleep(60), heed, "hanging")
"""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (1, "not wanted\n")
    assert time.monotonic() - start < SOON
