"""One of several ranks cannot load: all of them end within seconds, each with that rank's reason."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import small_sets
import torch
import torch.distributed as dist

import loader
import shardconv
from loader import load
from loader.group.agreement import merged
from loader.group.processes import has_ended, this_process

NAME = "qwenimage"
SOON = 10  # seconds within which every rank must have ended
RANK_1 = "rank-00001-of-00004.safetensors"


# --- what happens to rank 1 of 4 ---


def remove(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def corrupt(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()  # a mode would not stop root


def unlucky(act: Callable[[], Any]) -> Any:
    """`act` in the place of what maps the first file of rank 1, in the middle of its loading."""

    def map_file(*args: Any) -> Any:
        act()
        return mapped(*args)

    mapped = load.map_file
    return mock.patch.object(load, "map_file", map_file)


def fail(error: BaseException) -> None:
    raise error


ACTS: dict[str, Callable[[], Any]] = {
    "memory": lambda: fail(MemoryError("no room for 40 GB")),
    "device-memory": lambda: fail(torch.OutOfMemoryError("CUDA out of memory")),
    "disk": lambda: fail(OSError(5, "Input/output error")),
    "exit": lambda: fail(SystemExit("enough")),
    "interrupt": lambda: fail(KeyboardInterrupt()),
    "slow": lambda: time.sleep(2),
    "a-little-slow": lambda: time.sleep(0.7),
    "dies": lambda: os._exit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def load_with(path: Path, act: str | None, options: dict[str, Any], victim: int = 1) -> str:
    with unlucky(ACTS[act]) if act and dist.get_rank() == victim else contextlib.nullcontext():
        loader.load_model(path, device="cpu", **options)
    return "loaded"


def reasons(outcomes: list[ranks.Outcome]) -> str:
    """What all of these ranks gave as the reason, soon."""
    outcome = ranks.same(outcomes)
    assert outcome.error == "LoadError", outcome.trace
    assert all(each.seconds < SOON for each in outcomes)
    return outcome.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "options", "text"),
    [
        pytest.param(remove, {}, rf"rank 1: \S+/{RANK_1}: cannot be read \(No such file.*\); fetch or", id="missing"),
        pytest.param(shorten, {}, rf"rank 1: {RANK_1}: header declares [\d,]+ bytes, file has [\d,]+; ", id="short"),
        pytest.param(
            corrupt, {"verify": True}, rf"rank 1: {RANK_1}: \S+ is damaged \(its digest differs\)", id="corrupt"
        ),
        pytest.param(make_unreadable, {}, rf"rank 1: \S+/{RANK_1}: cannot be read \(Is a directory\)", id="unreadable"),
    ],
)
def test_f3_a_file_that_one_rank_cannot_use_ends_all_four(damage, options, text, tmp_path: Path):
    """A missing, short, corrupt or unreadable file of rank 1 is the reason that each of four ranks gives."""
    out = small_sets.copied(small_sets.converted(NAME, 4), tmp_path / "out")
    damage(out / "tp4" / RANK_1)
    assert re.match(text, reasons(ranks.run(load_with, out, None, options, n=4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "text"),
    [
        ("memory", "rank 1: MemoryError: no room for 40 GB"),
        ("device-memory", "rank 1: OutOfMemoryError: CUDA out of memory"),
        ("disk", "rank 1: OSError: [Errno 5] Input/output error"),
    ],
)
def test_f3_an_error_of_one_rank_ends_all_four(act, text):
    """Lack of memory and errors of a disk on rank 1 are told by all four ranks, with their kind."""
    assert reasons(ranks.run(load_with, small_sets.converted(NAME, 4), act, {}, n=4)) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "text"),
    [
        ("dies", r"rank 1: its process \(\d+\) ended while it was loading; see its output, or was memory short\?"),
        ("killed", r"rank 1: its process \(\d+\) ended while it was loading; see its output, or was memory short\?"),
        ("exit", r"rank 1: SystemExit: enough"),
        ("interrupt", r"rank 1: KeyboardInterrupt: "),
    ],
)
def test_f3_a_rank_that_dies_ends_the_others(act, text):
    """A process that is killed or leaves, and an interrupt, end the other three with the number of that rank."""
    first, victim, *others = ranks.run(load_with, small_sets.converted(NAME, 4), act, {}, n=4)
    assert victim.error == "killed"
    assert re.fullmatch(text, reasons([first, *others]))


@pytest.mark.slow
def test_f3_a_slow_rank_is_named_when_the_time_is_up():
    """After `timeout` seconds without an answer of rank 1 all raise, rank 1 itself as soon as it comes to it."""
    outcomes = ranks.run(load_with, small_sets.converted(NAME, 4), "slow", {"timeout": 1}, n=4)
    assert reasons(outcomes) == (
        "rank 1: no answer 1 s after another rank was done; see its output, or give it longer with timeout="
    )
    assert [each.seconds < 3 for each in outcomes] == [True, False, True, True]


@pytest.mark.slow
def test_a_slow_rank_is_waited_for():
    """Within the time a slow rank is waited for, and all load."""
    found = ranks.run(load_with, small_sets.converted(NAME, 4), "a-little-slow", {"timeout": 20}, n=4)
    assert [each.value for each in found] == ["loaded"] * 4
    assert all(each.seconds > 1.4 for each in found)


def fail_while_rank_0_builds(path: Path, marker: Path) -> str:
    """Rank 1 fails at once, while rank 0 takes three seconds to build its model; then it would go on with it."""
    rank = dist.get_rank()
    if rank == 0:
        build = load.skeleton
        slow = mock.patch.object(load, "skeleton", lambda *args: (time.sleep(3), build(*args))[1])
        with slow, mock.patch.object(load, "attach", side_effect=lambda *args: marker.touch()):
            loader.load_model(path, device="cpu")
    loader.load_model(path / "nowhere" if rank == 1 else path, device="cpu")
    return "loaded"


@pytest.mark.slow
def test_f3_a_failure_ends_the_work_of_the_others(tmp_path: Path):
    """When rank 1 fails at once its peers do not wait for rank 0, and rank 0 does not go on with its model."""
    path = small_sets.converted(NAME, 4)
    outcomes = ranks.run(fail_while_rank_0_builds, path, tmp_path / "attached", n=4)
    assert (
        reasons(outcomes) == f"rank 1: {path / 'nowhere'}: no such folder; give the folder that shardconv convert wrote"
    )
    assert not (tmp_path / "attached").exists()
    assert [each.seconds < 3 for each in outcomes] == [False, True, True, True]


def fail_then_load(path: Path, act: str, options: dict[str, Any]) -> str:
    try:
        load_with(path, act, options)
    except shardconv.LoadError:
        return load_with(path, None, {})
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize(("act", "options"), [("memory", {}), ("slow", {"timeout": 0.5})])
def test_a_group_can_load_again_after_a_failure(act, options):
    """A failed load leaves the ranks in step: the next one works, also when one of them came late."""
    assert ranks.values(fail_then_load, small_sets.converted(NAME, 2), act, options) == ["loaded"] * 2


def load_in_pairs(path: Path) -> str:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    loader.load_model(
        path if dist.get_rank() != 1 else path / "nowhere", device="cpu", group=pairs[dist.get_rank() // 2]
    )
    return "loaded"


@pytest.mark.slow
def test_a_failure_concerns_the_ranks_of_its_group_only():
    """Of two groups of two, the one whose second rank fails raises, with the rank within it; the other loads."""
    first, second, *others = ranks.run(load_in_pairs, small_sets.converted(NAME, 2), n=4)
    assert reasons([first, second]).startswith("rank 1: ")
    assert [each.value for each in others] == ["loaded"] * 2


# --- where the store is in the process of rank 0 ---


def load_over_tcp(path: Path, port: int, act: str | None, victim: int) -> str:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    return load_with(path, act, {}, victim)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_the_rank_that_keeps_the_store_stays_until_all_have_heard(victim):
    """Rank 0, whose process keeps the store and ends with the error, leaves no rank without the reason."""
    path = small_sets.converted(NAME, 4)
    outcomes = ranks.run(load_over_tcp, path, free_port(), "memory", victim, n=4, group=False)
    assert reasons(outcomes) == f"rank {victim}: MemoryError: no room for 40 GB"


@pytest.mark.slow
def test_f3_a_store_that_dies_with_its_rank_ends_the_others():
    """When rank 0 is killed, and the store with it, the others say so instead of waiting."""
    path = small_sets.converted(NAME, 4)
    victim, *others = ranks.run(load_over_tcp, path, free_port(), "killed", 0, n=4, group=False)
    assert victim.error == "killed"
    for each in others:
        assert each.error == "LoadError"
        assert re.match(
            r"process group: its store does not answer any more \(|rank 0: its process \(\d+\) ended", each.text
        )
        assert each.seconds < SOON


# --- parts ---


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "60", None])
def test_a_timeout_that_is_no_time_is_refused(timeout: Any):
    """`timeout` is a number of seconds above 0."""
    with pytest.raises(shardconv.UsageError, match=r"^timeout: expected a number of seconds above 0, found "):
        loader.load_model("anywhere", timeout=timeout)


@pytest.mark.parametrize(
    ("by_rank", "issues"),
    [
        ([[], []], []),
        ([["a"], []], ["rank 0: a"]),
        ([["a", "b"], ["c"]], ["rank 0: a", "rank 0: b", "rank 1: c"]),
        ([["a", "b"], ["a", "b"]], ["every rank: a", "every rank: b"]),
        ([["a"], ["a"], []], ["rank 0: a", "rank 1: a"]),
    ],
)
def test_reasons_of_ranks_make_issues(by_rank, issues):
    """A reason stands with its rank, and once when every rank has it."""
    assert merged(by_rank) == issues


def test_a_process_is_known_to_have_ended_or_not():
    """A running process and one of another machine have not ended; one that was waited for, a zombie, and one whose
    number another process has got, have."""
    assert not has_ended(this_process())
    code = "from loader.group.processes import this_process; print(this_process(), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        told = child.stdout.readline()
        machine, pid, start = told.split()
        assert int(pid) == child.pid
        assert not has_ended(told)
        assert has_ended(f"{machine} {os.getpid()} {start}")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(told)
        child.wait()
        assert has_ended(told)
        assert not has_ended(f"elsewhere {pid} {start}")
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("unknown", ["", "a b", "a b c"])
def test_what_is_not_known_of_a_process_is_not_its_end(unknown: str):
    """Where the system does not tell, no process is taken for dead."""
    assert not has_ended(unknown)
    machine = this_process().split()[0]
    assert not has_ended(f"{machine} {unknown or 'x'} 1")
