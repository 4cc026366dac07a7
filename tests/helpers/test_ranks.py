"""The helper that runs ranks for the other tests."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ranks
import torch
import torch.distributed as dist

pytestmark = pytest.mark.slow


def rank_and_sum(number: int) -> tuple[int, int, str]:
    total = torch.tensor([number])
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.environ["RANK"]


def fail_on_rank_1() -> str:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not like this")
    return "fine"


def die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_ranks_share_a_group_and_results_come_by_rank(n):
    """Every rank runs in its own process of one gloo group, and `values` returns what each gave, by rank."""
    assert ranks.values(rank_and_sum, 3, n=n) == [(rank, 3 * n, str(rank)) for rank in range(n)]


def test_an_exception_of_a_rank_is_reported_and_fails_values():
    """An exception is data to `run` and a failed test to `values`."""
    good, bad = ranks.run(fail_on_rank_1)
    assert (good.value, good.error) == ("fine", None)
    assert (bad.error, bad.text, "ValueError" in bad.trace) == ("ValueError", "rank 1 does not like this", True)
    with pytest.raises(pytest.fail.Exception, match="rank 1 does not like this"):
        ranks.values(fail_on_rank_1)


def test_a_rank_that_dies_is_reported_with_what_it_printed():
    """A process that dies without a word from Python gives the signal and its output."""
    dead, _ = ranks.run(die_on_rank_0)
    assert dead.error == "killed"
    assert "SIGKILL" in dead.text
    assert "last words" in dead.text


def test_a_hung_rank_fails_the_test_in_time_and_the_next_job_runs():
    """A rank that hangs is killed, fails the test with where it stood, and does not spoil the next job."""
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"not done after 2 s(.|\n)*hang_on_rank_1"):
        ranks.run(hang_on_rank_1, timeout=2)
    assert time.monotonic() - start < 10
    assert ranks.values(rank_and_sum, 1) == [(0, 2, "0"), (1, 2, "1")]
