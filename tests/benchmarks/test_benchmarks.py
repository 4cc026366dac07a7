"""The benchmarks run, in small, and notice bytes that are not the right ones."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts: each imports its neighbours by their plain names

bench_convert, bench_load, bench_start, bench_step, common, gpu_check, report = map(
    import_module, ["bench_convert", "bench_load", "bench_start", "bench_step", "common", "gpu_check", "report"]
)

MODEL = ["--model", "small-flux2", "--gb", "0", "--files", "1", "--rounds", "1"]
FAKE_RSS_NBYTES = 200 << 20  # of a child that was forked, which has no peak of its own

Run = Callable[..., dict[str, Any]]


def run_script(argv: list[str]) -> str:
    """What a script prints, in this process; `argv` starts with the script, or with -m and a module."""
    out = io.StringIO()
    sys.path.insert(0, str(BENCHMARKS))
    module = argv[0] == "-m"
    sys.argv = argv[1:] if module else argv
    start = runpy.run_module if module else runpy.run_path
    with contextlib.redirect_stdout(out):
        try:
            start(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{argv}: exit code {end.code}") from None
    return out.getvalue()


def forked_child(argv: list[str], **more: str) -> Any:
    """As `common.run_child`, without paying for the imports again; what is not a Python script is really started."""
    if argv[0] != sys.executable or argv[1] == "-c":
        return started_child(argv, **more)
    start = time.perf_counter()
    out = ranks.values(run_script, list(argv[1:]), n=1, group=False, env=more)[0]
    return common.Child(time.perf_counter() - start, FAKE_RSS_NBYTES, 0, 0, out)


started_child = common.run_child


def forked_ranks(argv: list[str], n: int, limit_s: float = 60) -> list[Any]:
    """As `common.run_ranks`, likewise."""
    started = time.monotonic()
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(common._free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    outs = ranks.values(run_script, list(argv[1:]), n=n, group=False, env=env, timeout=limit_s)
    return [common.RankEnd(json.loads(out.strip().splitlines()[-1]), started) for out in outs]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scratch folder that the benchmarks share, so that the checkpoint is made once."""
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture
def run(work: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a benchmark's command line on the small model; returns its report."""
    monkeypatch.setattr(common, "run_child", forked_child)
    monkeypatch.setattr(common, "run_ranks", forked_ranks)

    def call(bench: Any, name: str, *flags: str, model: bool = True) -> dict[str, Any]:
        shared = [*MODEL, "--work", str(work)] if model else []
        monkeypatch.setattr(sys, "argv", [f"{bench.__name__}.py", *shared, "--results", str(work / "results"), *flags])
        bench.main()
        written: dict[str, Any] = json.loads((work / "results" / f"{name}.json").read_text())
        return written

    return call


def names(found: dict[str, Any], table: int = 0) -> set[str]:
    return {row["name"] for row in found["tables"][table]["rows"]}


@pytest.mark.slow
def test_convert(run):
    """The conversion, cp and the script give the same tensors; figures for time and memory are there."""
    found = run(bench_convert, "convert", "--tp", "2", "--copy-tp", "2", "--script-tp", "2", "--modes", "warm")
    assert names(found) == {bench_convert.ours(2), bench_convert.script(2), bench_convert.CP}
    assert found["figures"]


@pytest.mark.slow
def test_j5_load_cold_and_warm(run):
    """Every way to load that is installed gives the same tensors, warm and cold."""
    found = run(bench_load, "load", "--tp", "2")
    for table in (0, 1):
        assert {"ours", "diffusers streaming", "diffusers, then shard", bench_load.DD} <= names(found, table)
    assert names(found, 2) == {"ours", "ours, verify=True"}
    assert {each["what"].partition(":")[0] for each in found["figures"]} >= {"warm", "cold"}


@pytest.mark.slow
def test_load_notices_wrong_bytes(run, monkeypatch):
    """A contestant that comes back with one other byte stops the benchmark."""

    def convert_and_damage(source: Path, tp: int) -> Path:
        out: Path = convert(source, tp)
        path = out / f"tp{tp}" / "replicated.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        return out

    convert = common.converted
    monkeypatch.setattr(common, "converted", convert_and_damage)
    with pytest.raises(RuntimeError, match=r"ours: .*expected"):
        run(bench_load, "load", "--tp", "2", "--modes", "warm", "--only", "ours")


@pytest.mark.slow
def test_start(run):
    """Ranks of every contestant reach their first output, which is the same for all."""
    found = run(bench_start, "start")
    assert {bench_start.OURS, bench_start.PREFETCH, bench_start.STREAMING, bench_start.IMPORTS} <= names(found)
    assert set(found["output_differences"]) == {bench_start.OURS, bench_start.PREFETCH, bench_start.STREAMING}


@pytest.mark.slow
def test_step(run):
    """Both step, agree with the unsharded model, and a block of ours compiles as one graph."""
    flags = ["--shapes", "tiny", "--rounds", "2", "--steps", "1", "--backend", "aot_eager"]
    found = run(bench_step, "step", *flags, model=False)
    assert names(found) == {"ours", "diffusers DTensor"}


@pytest.mark.slow
def test_g3_memory(tmp_path, monkeypatch):
    """Merging and resharding a set take buffers, not the set: 300 MiB above an interpreter would do for any size."""
    bench_memory = import_module("bench_memory")
    # From a small process: a child is charged with the memory of the one that started it.
    command = [sys.executable, str(BENCHMARKS / "bench_memory.py"), "--gb", "0.05", "--work", str(tmp_path)]
    launcher = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    done = subprocess.run([sys.executable, "-c", launcher, *command], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rows"]
    assert [row["verb"] for row in rows] == ["verify", "merge", "reshard 4 to 6", "verify tp6"]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(bench_memory, "run", lambda *args: [{**rows[0], "mib_above_interpreter": 301.0}])
    assert bench_memory.main(["--work", str(tmp_path)]) == 1


@pytest.mark.slow
def test_gpu_check(run, capsys):
    """The accelerator check runs to its end without one, and says so."""
    found = run(gpu_check, "gpu-on-cpu", "--device", "cpu", "--tp", "2", "--small", "flux2")
    assert {"ours", "ours, read_file alone", "diffusers streaming", gpu_check.COPY} <= names(found)
    assert set(found["two_gloo_ranks_on_one_device"]) == {"flux2"}
    assert "no accelerator" in capsys.readouterr().out


@pytest.mark.slow
def test_a_child_is_measured(tmp_path):
    """A process that is really started reports its time, its peak memory and what it read, and fails loudly."""
    (tmp_path / "file").write_bytes(bytes(10_000_000))
    child = common.run_child(common.python("-c", "import sys; x = open(sys.argv[1], 'rb').read(); print('{\"n\": 1}')",
                                           tmp_path / "file"))  # fmt: skip
    assert child.result == {"n": 1}
    assert child.peak_rss_nbytes > 10_000_000
    assert child.syscall_read_nbytes > 10_000_000
    with pytest.raises(RuntimeError, match="exit code 3"):
        common.run_child(common.python("-c", "raise SystemExit(3)"))
    ends = common.run_ranks(common.python("-c", "import os; print(os.environ['RANK'])"), 2)
    assert [end.result for end in ends] == [0, 1]


def sample_report() -> dict[str, Any]:
    samples = {"ours": [{"seconds": 1.0, "gb_per_s": 2.0}, {"seconds": 3.0, "gb_per_s": 1.0}],
               "dd <b>": [{"seconds": 2.0}, {"seconds": 2.0}]}  # fmt: skip
    host = {"cpu": "c", "cores": 2, "memory_gib": 24, "kernel": "6", "file_system": "ext4", "load_average_at_end": 0.1}
    return {
        "question": "How long?", "date": "2026-01-01 00:00 UTC", "command": "python x.py", "host": host, "rounds": 2,
        "versions": {"python": "3"}, "verified": "by digest", "left_out": {"x": "is not installed"},
        "tables": [common.table("Load", samples, "dd <b>", "warm")],
        "figures": [common.figure("a", common.paired(samples, "ours", ["dd <b>"]), 1.5),
                    common.figure("b", 1.0, 2, at_most=False)],
    }  # fmt: skip


def test_ratios_are_paired_within_a_round():
    """The ratio is the median of the rounds' ratios, against the slowest of several."""
    samples = {"a": [{"seconds": 1.0}, {"seconds": 9.0}], "b": [{"seconds": 2.0}, {"seconds": 3.0}],
               "c": [{"seconds": 1.0}, {"seconds": 9.0}]}  # fmt: skip
    assert common.paired(samples, "a", ["b"]) == {"median": 1.75, "min": 0.5, "max": 3.0}
    assert common.paired(samples, "a", ["b", "c"]) == {"median": 0.75, "min": 0.5, "max": 1.0}
    assert common.paired(samples, "a", ["not there"]) is None


def test_contestants_take_turns_and_the_first_changes():
    """Each round has everyone once and starts with another."""
    seen: list[str] = []

    def contestant(name: str) -> Any:
        return common.Contestant(name, lambda: seen.append(name) or {"seconds": 1.0}, lambda: {"warm": True})

    samples = common.take_turns([contestant(name) for name in "abc"], 2)
    assert "".join(seen) == "abcbca"
    assert samples["a"] == [{"warm": True, "seconds": 1.0}] * 2


def test_the_report_is_the_same_for_the_same_figures():
    """Table and chart say each contestant, escape its name, and do not change from run to run."""
    found = sample_report()
    text, chart = report.markdown("load", found), report.chart(found)
    assert (text, chart) == (report.markdown("load", sample_report()), report.chart(sample_report()))
    assert "| ours | 2.00 | 1.00 to 3.00 | 1.00 | 1.50 |" in text
    assert "| a | 1.00 (0.5 to 1.50) | at most 1.5 | yes |" in text
    assert "| b | 1.00 | at least 2 | **no** |" in text
    assert "left out: x: is not installed" in text
    shown = [each.text for each in ElementTree.fromstring(chart).iter() if each.tag.endswith("text")]
    assert {"How long?", "ours", "dd <b>"} <= set(shown)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00002, "0"), (0.01234, "0.0123"), (1, "1.00"), (9.876, "9.88"), (12.34, "12.3"), (12345.6, "12,346")],
)
def test_numbers_are_short(value, text):
    """Three digits, and no exponent."""
    assert report.number(value) == text


def test_digests_of_a_file_are_those_of_its_tensors(tmp_path):
    """The benchmarks' own reading of a safetensors file agrees with safetensors' reading."""
    import torch
    from oracle import describe
    from safetensors.torch import save_file

    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.tensor(7), "c": torch.ones(0, 2)}
    save_file(tensors, tmp_path / "x.safetensors")
    found = common.digests_of_file(tmp_path / "x.safetensors")
    assert found == {name: describe(tensor) for name, tensor in tensors.items()}
    with pytest.raises(RuntimeError, match="me: a: expected"):
        common.check_equal("me", found, found | {"a": "another"})
