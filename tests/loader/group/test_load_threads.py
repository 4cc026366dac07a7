"""Loading in several threads: alone and on groups of their own all load; one group is in one call at a time."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import small_sets
import torch.distributed as dist

import loader
from loader import load
from shardconv import CheckpointError
from shardconv.libraries.choose import model_class

NAME = "qwenimage"
SOON = 10  # seconds
REFUSED = (
    r"group: load_model was called while another thread of this process is in {} with the same group; make one call "
    r"after the other, or give each thread a group of its own \(torch.distributed.new_group\)"
)

FIRST_LOADS = """
import sys, threading
import loader
sys.setswitchinterval(1e-5)
barrier, found = threading.Barrier(len(sys.argv) - 1), {}
def go(path):
    barrier.wait()
    try:
        found[path] = loader.load_model(path, device="cpu")
    except BaseException as error:
        found[path] = error
threads = [threading.Thread(target=go, args=(path,)) for path in sys.argv[1:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for path, model in found.items():
    again = loader.load_model(path, device="cpu").state_dict()
    assert {name: tensor.sum() for name, tensor in model.state_dict().items()} == {
        name: tensor.sum() for name, tensor in again.items()
    }
    assert all(not tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
print(len(found))
"""


@pytest.mark.slow
def test_the_first_loads_of_a_process_in_several_threads() -> None:
    """Threads that load four classes, two each, before anything is imported get their models, whole and right."""
    paths = [small_sets.converted(name, 1) for name in small_sets.planned("flux", "flux2", "qwenimage", "qwenimage21")]
    paths += [path / "tp1" for path in paths]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LOADS, *map(str, paths)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout, done.returncode) == (f"{len(paths)}\n", 0), done.stderr


def test_a_class_that_fails_to_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in importing a class that diffusers has is told, not taken for a class that it lacks."""
    for module in ("diffusers", "diffusers.models", "diffusers.models.transformers"):  # as if nobody had asked before
        monkeypatch.delattr(sys.modules[module], "BriaTransformer2DModel", raising=False)
    monkeypatch.setitem(sys.modules, "diffusers.models.transformers.transformer_bria", None)
    said = r"BriaTransformer2DModel: diffusers \S+ has it but fails to import it \(\w+: import of .* halted"
    with pytest.raises(CheckpointError, match=said):
        model_class("BriaTransformer2DModel")
    with pytest.raises(CheckpointError, match="not one in the installed diffusers"):
        model_class("Nope2DModel")


# --- on process groups ---


def in_threads(*calls: Callable[[], Any]) -> list[str]:
    """What each gave, all begun at the same time: "loaded" or the text of its error."""
    barrier, found = threading.Barrier(len(calls)), [""] * len(calls)

    def run(position: int, call: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            call()
            found[position] = "loaded"
        except Exception as error:
            found[position] = str(error)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def load_on_groups(path: Path) -> tuple[list[str], float]:
    """Twice a load and a model sharded in memory on each of two groups of the same ranks, side by side."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]

    def work(group: Any) -> None:
        for _ in range(2):
            loader.load_model(path, device="cpu", group=group)
            loader.parallelize(small_sets.build(NAME), group=group)

    found = in_threads(*(lambda group=group: work(group) for group in groups))
    return found, float(sum(each.sum() for each in loader.load_model(path, device="cpu").parameters()))


@pytest.mark.slow
def test_threads_with_groups_of_their_own_load_at_the_same_time() -> None:
    """Two threads of each rank, each with its own group, take none of each other's answers."""
    found = ranks.values(load_on_groups, small_sets.converted(NAME, 2))
    assert [each for each, _ in found] == [["loaded", "loaded"]] * 2


def load_second(path: Path, second: str) -> tuple[list[str], str]:
    """While a first load goes on in every rank, or in rank 1 only, another call is made; and another load after all."""
    building, go_on = threading.Event(), threading.Event()
    skeleton = load.skeleton

    def slow(*args: Any) -> Any:
        building.set()
        go_on.wait(30)
        return skeleton(*args)

    calls: dict[str, Callable[[], Any]] = {
        "load_model": lambda: loader.load_model(path, device="cpu"),
        "load_pipeline": lambda: loader.load_pipeline(path, device="cpu"),
        "parallelize": lambda: loader.parallelize(model),
    }
    model = small_sets.build(NAME)

    def call() -> None:
        building.wait(30)
        try:
            calls[second]()
        finally:
            go_on.set()

    with mock.patch.object(load, "skeleton", slow):
        found = in_threads(lambda: loader.load_model(path, device="cpu"), call)
    loader.load_model(path, device="cpu")
    return found, "loaded again"


@pytest.mark.slow
@pytest.mark.parametrize("second", ["load_model", "load_pipeline", "parallelize"])
def test_a_second_call_on_one_group_is_refused(second: str) -> None:
    """While a thread loads on a group another call is refused with a sentence; the first loads, and so does a third."""
    for (first, refused), again in ranks.values(load_second, small_sets.converted(NAME, 2), second):
        assert first == "loaded"
        assert re.fullmatch(REFUSED.format("load_model").replace("load_model was", f"{second} was"), refused)
        assert again == "loaded again"


def overlap_on_rank_1(path: Path) -> list[str]:
    """Two loads, one after the other on rank 0, at the same time on rank 1."""
    calls = [lambda: loader.load_model(path, device="cpu")] * 2
    if dist.get_rank() == 0:
        return [*in_threads(calls[0]), *in_threads(calls[1])]
    taken, attach = threading.Event(), load.attach

    def slow(*args: Any) -> None:
        taken.set()
        time.sleep(0.4)
        attach(*args)

    with mock.patch.object(load, "attach", slow):
        return in_threads(calls[0], lambda: (taken.wait(30), calls[1]())[1])


@pytest.mark.slow
def test_a_refused_call_is_heard_by_the_ranks_that_make_it() -> None:
    """Where only one rank's threads overlap, the others do not wait for the call that it refused."""
    outcomes = ranks.run(overlap_on_rank_1, small_sets.converted(NAME, 2))
    (first, second), (first_there, refused) = (each.value for each in outcomes)
    assert (first, first_there) == ("loaded", "loaded")
    assert re.fullmatch(REFUSED.format("load_model"), refused)
    assert second == f"rank 1: {refused}"
    assert all(each.seconds < SOON for each in outcomes)


def load_crosswise(first: Path, second: Path) -> list[str]:
    """Two threads load two things, on each rank in another order."""
    calls = [lambda: loader.load_model(first, device="cpu"), lambda: loader.load_model(second, device="cpu")]
    late = 1 - dist.get_rank()
    calls[late] = lambda call=calls[late]: (time.sleep(0.2), call())[1]
    return in_threads(*calls)


@pytest.mark.slow
def test_threads_in_another_order_on_each_rank_end_with_a_sentence() -> None:
    """Two loads on one group that begin in different orders: no wrong model, no wait, every thread hears a reason."""
    outcomes = ranks.run(load_crosswise, small_sets.converted(NAME, 2), small_sets.converted("flux", 2), timeout=30)
    for each in outcomes:
        assert each.seconds < SOON
        for text in each.value:
            assert re.search(r"the ranks load different things|another thread of this process", text), text


# --- ranks that do not make the same calls ---


def do_different_things(path: Path) -> None:
    if dist.get_rank():
        loader.parallelize(small_sets.build(NAME))
    else:
        loader.load_model(path, device="cpu")


def leave_early(path: Path) -> None:
    """Rank 1 fails between two steps, where nobody should."""
    if dist.get_rank():
        with mock.patch.object(load.remote, "is_repo", side_effect=ValueError("a bug")):
            loader.load_model(path, device="cpu")
    loader.load_model(path, device="cpu")


@pytest.mark.slow
def test_ranks_in_different_calls_are_told_so() -> None:
    """One rank loads while another shards in memory: both raise at once, with who did what."""
    outcomes = ranks.run(do_different_things, small_sets.converted(NAME, 2), timeout=30)
    assert all(each.seconds < SOON for each in outcomes)
    assert ranks.same(outcomes).text == (
        "the ranks are in different calls, rank 0 in load_model, rank 1 in parallelize; have all make the same calls "
        "in one order"
    )


@pytest.mark.slow
def test_a_rank_that_left_a_call_is_not_waited_for() -> None:
    """A rank that is out of the call, whatever made it leave, is named at once."""
    left, failed = ranks.run(leave_early, small_sets.converted(NAME, 2), timeout=30)
    assert (failed.error, failed.text) == ("ValueError", "a bug")
    assert (
        left.text == "rank 1: left load_model before this step; see its output, and have all ranks make the same calls"
    )
    assert left.seconds < SOON


def load_twice_at_once(path: Path) -> list[str]:
    return in_threads(*[lambda: loader.load_model(path, device="cpu")] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True])
def test_one_process_loads_in_as_many_threads_as_it_likes(group: bool) -> None:
    """Without a group, and in a group of one, nothing is refused."""
    path = small_sets.converted(NAME, 1)
    assert ranks.values(load_twice_at_once, path, n=1, group=group, env={"WORLD_SIZE": "1"}) == [["loaded"] * 2]
