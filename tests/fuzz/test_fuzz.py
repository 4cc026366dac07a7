"""Readers of files that others wrote: whatever stands in them, the answer is a value or an error of our tree."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from run import Report, fuzz, limited, try_case
from targets import CONFIG, TARGETS, Finding, Target

EXAMPLES = 60  # for each target; `python tests/fuzz/run.py --minutes 10` goes on


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_read(name: str) -> None:
    """What fuzzing starts from is sound, so that a change of it is what is refused."""
    report = Report()
    for case in TARGETS[name].seeds:
        try_case(TARGETS[name], case, report)
    assert set(report.outcomes) <= {"read", "merged"}
    assert not report.findings


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_escapes_a_reader(name: str) -> None:
    """Broken inputs end in an error of our tree: no other exception, no hang, no allocation out of proportion."""
    report = Report()
    with limited():
        fuzz(TARGETS[name], report, random.Random(name), 60, EXAMPLES)
    assert report.examples == EXAMPLES
    assert list(report.findings) == []


def _raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (lambda folder: _raises(KeyError("x")), "KeyError"),
        (lambda folder: _raises(RecursionError()), "RecursionError"),
        (lambda folder: _raises(MemoryError()), "MemoryError"),
        (lambda folder: _raises(Finding("differs")), "differs"),
        (lambda folder: str(len(bytearray(32 << 20))), "over-allocation"),
    ],
    ids=["exception", "recursion", "memory", "difference", "allocation"],
)
def test_the_harness_notices(run, found: str) -> None:
    """Each kind of fault in a reader is a finding."""
    report = Report()
    try_case(Target(run, []), {"config.json": CONFIG}, report)
    (what,) = report.findings
    assert found in what


def _spin(folder: Path) -> str:
    while True:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("run", [lambda folder: time.sleep(10), _spin], ids=["waits", "loops"])
def test_the_harness_notices_a_hang(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that does not come back is stopped and is a finding."""
    monkeypatch.setattr("run.DEADLINE", 0.05)
    report = Report()
    try_case(Target(run, []), {"config.json": CONFIG}, report)
    (what,) = report.findings
    assert "Hang" in what


def test_new_ways_through_a_reader_are_kept() -> None:
    """An input that goes a way not seen before joins the corpus; the same input again does not."""
    report = Report()
    header = TARGETS["header"]
    assert try_case(header, header.seeds[0], report)
    assert not try_case(header, header.seeds[0], report)
    assert try_case(header, {"model.safetensors": b""}, report)
