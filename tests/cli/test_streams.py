"""The command line with streams that are closed, full, broken or of another encoding: the work is done all the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import toys

from shardconv.cli import check
from shardconv.cli.main import main
from shardconv.errors import RanksFailed
from shardconv.plans.catalogue import small_models
from shardconv.system.children import run_together
from shardconv.target import folder as destination
from shardconv.target.folder import PartialFolder
from shardconv.trial import check as checking
from shardconv.trial import check_ranks, demo
from shardconv.trial.check import Difference, Verdict

pytestmark = pytest.mark.slow
SHARDCONV = f"{shlex.quote(sys.executable)} -m shardconv"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set whose folder's name is not ASCII."""
    folder = tmp_path_factory.mktemp("streams")
    toys.save(small_models.build("flux2"), folder / "source")
    assert main(["convert", "--tp", "2", "--quiet", str(folder / "source"), str(folder / "übung-模型")]) == 0
    return folder / "übung-模型"


def _sh(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of shell, as a person types it: streams are buffered."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(["bash", "-c", command], capture_output=True, env=buffered | environment, check=False)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_stop_nothing(closed: str, converted: Path, tmp_path: Path) -> None:
    """With any of the standard streams closed a conversion writes the set that it writes otherwise, and exits with 0:
    nothing that is printed gets into a file of the set."""
    source, out = converted.parent / "source", tmp_path / "out"
    done = _sh(f"{SHARDCONV} convert --tp 2 {source} {out} {closed}")
    assert (done.returncode, done.stderr) == (0, b"")
    assert toys.contents(out) == toys.contents(converted)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("verb", ["inspect {}", "verify --json {}", "merge --json {} {new}", "reshard --tp 4 {} {new}"])
def test_every_verb_works_without_streams(closed: str, verb: str, converted: Path, tmp_path: Path) -> None:
    """A verb whose report nobody can read does its work and exits with 0."""
    command = verb.format(shlex.quote(str(converted)), new=tmp_path / "new")
    assert _sh(f"{SHARDCONV} {command} {closed}").returncode == 0


def test_a_failure_is_still_a_failure_without_streams(tmp_path: Path) -> None:
    """Exit codes do not depend on whether the reason can be printed."""
    assert _sh(f"{SHARDCONV} verify {tmp_path}/nowhere 2>&-").returncode == 1
    assert _sh(f"{SHARDCONV} verify 2>&-").returncode == 2


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"PYTHONIOENCODING": "ascii"}, rb"\xfcbung-\u6a21\u578b"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, rb"\udcc3\udcbcbung"),
    ],
)
def test_what_an_encoding_lacks_is_escaped(environment: dict[str, str], name: bytes, converted: Path) -> None:
    """A name that the streams' encoding does not have is printed escaped, in reports and errors; nothing fails."""
    named = shlex.quote(str(converted))
    done = _sh(f"{SHARDCONV} inspect {named}", **environment)
    assert (done.returncode, name in done.stdout) == (0, True)
    done = _sh(f"{SHARDCONV} verify {named}/nowhere", **environment)
    assert done.returncode == 1
    assert done.stderr.startswith(b"shardconv: ")
    assert name in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_name_that_is_no_text_is_escaped(converted: Path, tmp_path: Path) -> None:
    """A folder whose name is not UTF-8 is taken and named, escaped, in reports and errors; it can be drawn too."""
    folder = os.fsencode(tmp_path) + b"/\xff"
    shutil.copytree(converted, os.fsdecode(folder))
    command = [sys.executable, "-m", "shardconv", "inspect", "--svg", folder + b"/drawn.svg", folder]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\udcff/tp2: Flux2Transformer2DModel" in done.stdout
    done = subprocess.run([*command[:4], folder + b"/nowhere"], capture_output=True, check=False)
    assert done.returncode == 1
    assert b"\\udcff/nowhere" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("verb", "note"),
    [
        ("merge {} {new}/merged", b"; the work itself is done"),
        ("inspect --svg {new}/drawn.svg {}", b""),
        ("demo", b""),
        ("--help", b""),
    ],
)
def test_a_full_stdout_is_told(verb: str, note: bytes, converted: Path, tmp_path: Path) -> None:
    """When the report cannot be written the exit code is 1, with one sentence and no traceback; what goes to disk goes
    there all the same, and only then it says so."""
    done = _sh(f"{SHARDCONV} {verb.format(shlex.quote(str(converted)), new=tmp_path)} >/dev/full")
    assert done.returncode == 1
    said = b"shardconv: standard output: cannot be written (No space left on device)"
    assert done.stderr == said + note + b"\n"
    assert len(os.listdir(tmp_path)) == ("{new}" in verb)


def test_a_full_stderr_changes_no_exit_code(converted: Path, tmp_path: Path) -> None:
    """Reasons that cannot be written leave the exit code as it is."""
    assert _sh(f"{SHARDCONV} verify {tmp_path}/nowhere 2>/dev/full").returncode == 1
    assert _sh(f"{SHARDCONV} verify 2>/dev/full").returncode == 2
    assert _sh(f"{SHARDCONV} verify {shlex.quote(str(converted))} 2>/dev/full").returncode == 0


@pytest.mark.parametrize("stdout", [">/dev/full", "| true"])
def test_damage_is_told_although_nobody_reads_the_report(stdout: str, converted: Path, tmp_path: Path) -> None:
    """`verify` names what is damaged on stderr whatever stdout is."""
    shutil.copytree(converted, tmp_path / "bad")
    path = tmp_path / "bad" / "tp2" / "replicated.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    done = _sh(f"set -o pipefail; {SHARDCONV} verify --json {tmp_path}/bad {stdout}")
    assert done.returncode == 1
    assert b"replicated.safetensors: " in done.stderr
    assert b"is damaged" in done.stderr


def test_processes_started_without_streams_have_them(tmp_path: Path) -> None:
    """What a verb starts inherits streams that lead to nowhere, not closed ones."""
    code = (
        "import os, subprocess, sys; from shardconv.cli.output import open_streams; open_streams();"
        "sys.exit(subprocess.run([sys.executable, '-c', 'import os; [os.fstat(fd) for fd in range(3)]']).returncode)"
    )
    assert _sh(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} >&- 2>&- <&-").returncode == 0


def test_json_has_no_infinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check --json` of an output that is no number is JSON by the letter: null, and an issue that says so."""
    found = Verdict("Some", 2, float("inf"), (), (Difference("blocks.0", float("inf")), Difference("blocks.1", 0.5)))
    monkeypatch.setattr(check, "check", lambda *args: found)
    assert main(["check", "Some", "--tp", "2", "--json"]) == 1
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert document["difference"] is None
    assert [layer["difference"] for layer in document["layers"]] == [None, 0.5]
    assert "no number" in document["issues"][0]
    assert document["right"] is False


@pytest.mark.parametrize(
    ("body", "head", "last"),
    [
        ("import os; os.kill(os.getpid(), 9)", "(ended by SIGKILL, was memory short?) without a word", ""),
        ("import os; os.abort()", "(ended by SIGABRT) without a word", ""),
        (
            "raise RuntimeError('no gloo' + 2000 * ' here')",
            "(exit code 1)",
            f"    RuntimeError: no gloo{2000 * ' here'}",
        ),
        ("import sys; sys.exit('a\\nb\\x1b[2J')", "(exit code 1)", "    b\\x1b[2J"),
    ],
)
def test_a_crash_of_check_can_be_read(
    body: str, head: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the ranks of `check` wrote before they died arrives line by line, none cut, none with terminal controls;
    how they ended is said in words."""
    (tmp_path / "ranks.py").write_text(body)
    monkeypatch.setattr(checking, "COMMAND", [sys.executable, str(tmp_path / "ranks.py")])
    assert main(["check", "FluxTransformer2DModel", "--tp", "2"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"shardconv: check: the ranks failed {head}")
    assert lines[-1] == last or not last
    assert (len(lines) > 1) == bool(last)


def test_a_rank_of_check_that_dies_is_named(tmp_path: Path) -> None:
    """One rank of `check` that dies, here of memory, is named with how it ended and what it said, and not the plan
    called wrong; the others' wait ends too."""
    (tmp_path / "check.py").write_text(FAILING)
    command = [sys.executable, str(tmp_path / "check.py"), "check", "FluxTransformer2DModel", "--tp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert lines[0] == "shardconv: check: rank 1 failed (exit code 1), the last it wrote:"
    assert lines[-1] == "    MemoryError: none left"


# In the ranks' process, rank 1 runs out of memory when it is to shard the model.
FAILING = """
import sys
import shardconv.trial.check as checking
checking.COMMAND = [sys.executable, "-c", '''
import os, signal, sys
import shardconv.trial.check_ranks as ranks
real = ranks.parallelize
def parallelize(*args, **kwargs):
    if ranks.dist.get_rank() == 1:
        raise MemoryError('none left')
    return real(*args, **kwargs)
ranks.parallelize = parallelize
ranks.main(sys.argv[1])
''']
from shardconv.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


REPORT = '{"issues": ["a shape"]}'


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ((signal.raise_signal, signal.SIGKILL), (1, -signal.SIGKILL)),
        ((sys.exit, 3), (1, 3)),
        ((os._exit, 0), (1, 0)),
        ((Path.write_text, REPORT), None),
    ],
)
def test_no_rank_of_check_is_waited_for_in_vain(
    failing: tuple[Any, Any], expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that would wait for one which died, without a report whatever its exit code, or has failed with one, are
    ended; which died is told."""
    monkeypatch.setattr(check_ranks, "PATIENCE_S", 0.2)
    reports = [tmp_path / "0.json", tmp_path / "1.json"]
    target, argument = failing
    arguments = (reports[1], argument) if argument is REPORT else (argument,)
    fresh = multiprocessing.get_context("spawn")
    ranks = [fresh.Process(target=time.sleep, args=(600,)), fresh.Process(target=target, args=arguments)]
    for rank in ranks:
        rank.start()
    assert check_ranks._join(ranks, reports) == expected
    assert ranks[0].exitcode == -signal.SIGKILL


def test_a_crash_of_demo_can_be_read(tmp_path: Path) -> None:
    """Without a network for gloo `demo` shows the end of a rank's traceback: the reason, not who was told it."""
    done = _sh(f"{SHARDCONV} demo >{tmp_path}/said", GLOO_SOCKET_IFNAME="nowhere")
    assert done.returncode == 1
    lines = done.stderr.decode().splitlines()
    assert re.fullmatch(r"shardconv: demo: rank [01] failed \(exit code 1\), the last it wrote:", lines[0])
    assert "Unable to find address for: nowhere" in lines[-1]


def test_children_end_with_the_one_that_fails(tmp_path: Path) -> None:
    """When one of several processes fails the others are ended with all that they started; a kill is the reason
    before what others met from it."""
    sleeping = [sys.executable, "-c", "import os, time; os.fork(); time.sleep(600)"]
    failing = [sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(7)"]
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"demo: rank 1 failed \(exit code 7\) without a word"):
        run_together("demo", [sleeping, failing], tmp_path)
    assert time.monotonic() - start < 60
    assert subprocess.run(["pgrep", "-f", "os.fork.., time.sleep.600."], check=False).returncode == 1


def test_ctrl_c_cleans_up_under_a_foreign_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SIGINT has a handler that was not set from Python, which Python tells as None and cannot set again,
    a folder under construction is cleaned up as ever."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: pytest.fail("the handler would be lost"))
    with PartialFolder(tmp_path / "tp1") as partial:
        partial.create({"rank-00000-of-00001.safetensors": 10})
    assert os.listdir(tmp_path) == []


def test_ctrl_c_while_a_set_gets_its_name_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the exchange of two folders and the end of the clean-up leaves nothing of the replaced one."""
    (tmp_path / "tp1").mkdir()
    (tmp_path / "tp1" / "rank-00000-of-00001.safetensors").write_bytes(b"old")
    real = destination.exchange

    def exchange(new: Path, old: Path) -> Path:
        replaced = real(new, old)
        signal.raise_signal(signal.SIGINT)
        return replaced

    monkeypatch.setattr(destination, "exchange", exchange)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with PartialFolder(tmp_path / "tp1") as partial:
            partial.create({"rank-00000-of-00001.safetensors": 10})
            partial.publish({}, overwrite=True)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert os.listdir(tmp_path) == ["tp1"]
    assert (tmp_path / "tp1" / "rank-00000-of-00001.safetensors").read_bytes() == bytes(10)


def test_ctrl_c_in_a_demo_that_keeps_its_files_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`demo --keep` does not claim to leave nothing."""

    def stopped(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_run_ranks", stopped)
    assert main(["demo", "--keep", str(tmp_path / "kept")]) == 130
    assert (
        capsys.readouterr().err == f"shardconv: stopped; {tmp_path / 'kept'} holds what was made by then; remove it\n"
    )
