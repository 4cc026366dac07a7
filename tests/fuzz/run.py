"""Fuzz every reader of files that others wrote: `python tests/fuzz/run.py --minutes 10 --seed 1`.

Coverage-guided: an input that takes a reader along lines in an order not seen before is kept and mutated further. An
input is a finding when a reader raises what is not ours, hangs, or allocates out of proportion to what it was given;
the folder that did it is kept under `--keep`.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mutation
from mutation import Case
from targets import TARGETS, Target

import shardconv

DEADLINE = 5.0  # seconds for one input of at most a few MiB, traced
FACTOR = 64  # bytes allocated for each byte given: what Python's own json takes for the densest text, and a copy
MAX_CORPUS = 400  # cases kept for each target
MAX_KEPT_NBYTES = 30_000  # of a case that is mutated further; larger ones only cost time
_OURS = str(Path(shardconv.__file__).parent)

Arc = tuple[CodeType, int, int]


@dataclass
class Report:
    """What came of one target."""

    examples: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: dict[str, Case] = field(default_factory=dict)  # what happened, each kind once -> the first case of it
    arcs: set[Arc] = field(default_factory=set)
    corpus: list[Case] = field(default_factory=list)
    worst_seconds: float = 0.0
    worst_nbytes: int = 0  # allocated at once


class Hang(BaseException):
    """Past the deadline; no handler of the readers catches it."""


@contextmanager
def _deadline() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise Hang(f"still running after {DEADLINE} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE)
    faulthandler.dump_traceback_later(10 * DEADLINE, exit=True)  # a loop inside C cannot be interrupted otherwise
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def _coverage(arcs: set[Arc]) -> Iterator[None]:
    """Collects (code, line before, line) of everything in the package."""

    def local(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal last
        if event == "line":
            arcs.add((frame.f_code, last, frame.f_lineno))
            last = frame.f_lineno
        return local

    def enter(frame: FrameType, event: str, value: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(_OURS) else None

    last = 0
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(None)


def write(case: Case, folder: Path) -> None:
    """The case as a folder; a name that no file can have is left out."""
    for name, data in case.items():
        (folder / name).write_bytes(data)


def try_case(target: Target, case: Case, report: Report) -> bool:
    """Run one input and note what came of it. Returns whether it went a way not seen before."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        write(case, folder)
        arcs: set[Arc] = set()
        tracemalloc.start()
        start = time.perf_counter()
        try:
            with _deadline(), _coverage(arcs):
                outcome = target.run(folder)
        except (Exception, Hang) as error:
            outcome = _finding(error)
            report.findings.setdefault(outcome, dict(case))
        seconds, nbytes = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    given = sum(map(len, case.values()))
    if nbytes > FACTOR * given + target.allowance:
        report.findings.setdefault("over-allocation", dict(case))
    report.examples += 1
    report.outcomes[outcome] += 1
    report.worst_seconds = max(report.worst_seconds, seconds)
    report.worst_nbytes = max(report.worst_nbytes, nbytes)
    new = not arcs <= report.arcs
    report.arcs |= arcs
    return new


def _finding(error: BaseException) -> str:
    """One key for each kind: type, and the last line of ours that it passed."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_OURS)]
    where = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    text = re.sub(r"/dev/shm/\w+/|\d+", "", str(error))[:80]
    return f"FINDING {type(error).__name__}{where}: {text!r}"


def fuzz(target: Target, report: Report, rng: random.Random, seconds: float, examples: int | None = None) -> None:
    """Fuzz for so long, or for so many examples."""
    if not report.corpus:
        report.corpus = list(target.seeds)
    end = time.monotonic() + seconds
    done = 0
    while time.monotonic() < end and (examples is None or done < examples):
        case = rng.choice(rng.choice([target.seeds, target.seeds, report.corpus, report.corpus[-50:]]))
        for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
            case = mutation.change(case, rng)
        small = sum(map(len, case.values())) < MAX_KEPT_NBYTES
        if try_case(target, case, report) and small and len(report.corpus) < MAX_CORPUS:
            report.corpus.append(case)
        done += 1


@contextmanager
def limited() -> Iterator[None]:
    """No reader may take the machine's memory; what goes beyond 4 GiB is a MemoryError, and so a finding."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def summary(reports: Mapping[str, Report]) -> str:
    """A line for each target, one for each outcome."""
    lines = []
    for name, report in reports.items():
        lines.append(
            f"{name}: {report.examples:,} examples, {len(report.findings)} kinds of finding, {len(report.arcs)} arcs, "
            f"corpus {len(report.corpus)}, slowest {report.worst_seconds * 1000:.0f} ms, "
            f"most allocated {report.worst_nbytes / 2**20:.1f} MiB"
        )
        lines += [f"    {count:>9,}  {outcome}" for outcome, count in report.outcomes.most_common()]
        lines += [f"    finding: {what}" for what in report.findings if what not in report.outcomes]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=TARGETS, help="one target")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where the folders of findings go")
    args = parser.parse_args(argv)
    names = [args.only] if args.only else list(TARGETS)
    reports = {name: Report() for name in names}
    rng = random.Random(args.seed)
    turn = max(0.5, args.minutes * 60 / len(names) / 10)  # seconds; ten rounds
    end = time.monotonic() + args.minutes * 60
    with limited():
        while time.monotonic() < end:
            for name in names:
                fuzz(TARGETS[name], reports[name], rng, min(turn, end - time.monotonic()))
    for name, report in reports.items():
        for position, case in enumerate(report.findings.values()):
            folder = args.keep / f"{name}-{position}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write(case, folder)
    print(summary(reports))
    return 1 if any(report.findings for report in reports.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
