"""Threads are counted by the cores that this process may use, not by those of the machine."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import small_sets

import loader
from loader.files import validate
from shardconv import verify
from shardconv.engine.pool import READERS
from shardconv.system import cores
from shardconv.system.cores import usable_cores


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """192 cores, no limits, no other ranks."""
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(192)))
    monkeypatch.setattr(cores, "_MEMBERSHIP", Path("/nowhere"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.usefixtures("machine")
def test_the_cores_that_a_process_may_run_on_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """taskset and a job's cpuset limit, and several processes share; nobody gets none."""
    assert usable_cores() == 192
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4, 5, 6})
    assert [usable_cores(), usable_cores(2), usable_cores(8), usable_cores(0)] == [4, 2, 1, 4]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("membership", "files", "cores_found"),
    [
        ("0::/job", {"job/cpu.max": "400000 100000\n"}, 4),
        ("0::/job", {"job/cpu.max": "150000 100000\n"}, 2),
        ("0::/job", {"job/cpu.max": "1000 100000\n"}, 1),
        ("0::/job", {"job/cpu.max": "max 100000\n"}, 192),
        ("0::/job/step", {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "800000 100000\n"}, 8),
        ("0::/of/the/host", {"cpu.max": "300000 100000\n"}, 3),  # a container that sees its own group as the root
        ("0::/../other", {"cpu.max": "300000 100000\n"}, 3),
        (
            "4:cpu,cpuacct:/job\n1:memory:/m",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "500000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
            5,
        ),
        ("2:cpu:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 192),
        ("2:cpuset:/job", {"cpu/job/cpu.cfs_quota_us": "100000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 192),
        ("0::/job", {"job/cpu.max": "nonsense"}, 192),
        ("0::/job", {"job/cpu.max": "100000 0"}, 192),
        ("nonsense", {"cpu.max": "300000 100000\n"}, 192),
    ],
)
def test_the_quota_of_a_control_group_counts(
    membership: str, files: dict[str, str], cores_found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of either version, of the group itself and those above it, rounded up; what cannot be read limits nothing."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "membership").write_text(membership)
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "_MEMBERSHIP", tmp_path / "membership")
    assert usable_cores() == cores_found


def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that are started from now on."""
    names: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (names.append(thread.name), start(thread))[1])
    return names


@pytest.mark.slow
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("ranks", "allowed", "hashing"), [("8", 192, 16), ("16", 192, 12), ("8", 16, 2), ("8", 4, 1), ("", 192, 16),
                                      ("0", 2, 2), ("many", 2, 2)],
)  # fmt: skip
def test_ranks_of_a_node_share_its_cores(
    ranks: str, allowed: int, hashing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify=True` hashes with this rank's share of the cores that may be used, and no more than makes sense."""
    out = small_sets.converted("qwenimage", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    names = started(monkeypatch)
    loader.load_model(out, device="cpu", verify=True)
    assert len([name for name in names if name.startswith("loader-verify")]) == hashing <= validate.HASHERS


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("allowed", [1, 3, 192])
def test_the_converter_takes_all_usable_cores(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares with nobody, and stays within its memory."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    names = started(monkeypatch)
    verify(small_sets.converted("qwenimage", 1))
    assert 1 <= len([name for name in names if name.startswith("shardconv")]) <= min(allowed, READERS)
