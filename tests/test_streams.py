"""The command line with streams that are closed, full, broken or of another encoding: the work is done all the same."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import toys

from shardconv import checking, small_models
from shardconv.checking import Difference, Verdict
from shardconv.cli import check
from shardconv.cli.main import main
from shardconv.destination import PartialFolder

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
    """A line of shell, as a person types it."""
    return subprocess.run(["bash", "-c", command], capture_output=True, env=os.environ | environment, check=False)


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


def test_a_name_that_is_no_text_is_escaped(tmp_path: Path) -> None:
    """A folder whose name is not UTF-8 is named in an error, escaped."""
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    done = subprocess.run([sys.executable, "-m", "shardconv", "inspect", folder], capture_output=True, check=False)
    assert done.returncode == 1
    assert b"\\udcff" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_full_stdout_is_told(converted: Path) -> None:
    """When the report cannot be written the exit code is 1, with one sentence and no traceback."""
    done = _sh(f"{SHARDCONV} inspect {shlex.quote(str(converted))} >/dev/full")
    assert done.returncode == 1
    assert (
        done.stderr
        == b"shardconv: standard output: cannot be written (No space left on device); the work itself is done\n"
    )


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
    ("body", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the ranks failed (ended by SIGKILL, was memory short?) without a word"),
        ("raise RuntimeError('no gloo' + 2000 * ' here')", "    RuntimeError: no gloo here"),
    ],
)
def test_a_crash_of_check_can_be_read(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the ranks of `check` wrote before they died arrives line by line, none cut for another; how they ended
    is said in words."""
    (tmp_path / "ranks.py").write_text(body)
    monkeypatch.setattr(checking, "COMMAND", [sys.executable, str(tmp_path / "ranks.py")])
    assert main(["check", "FluxTransformer2DModel", "--tp", "2"]) == 1
    text = capsys.readouterr().err
    assert said in text
    assert "\\n" not in text
    assert ("Traceback" in text) == ("RuntimeError" in body)


def test_a_rank_of_check_that_dies_is_named() -> None:
    """One rank of `check` that is killed is named with how it ended; the others' wait ends too."""
    done = subprocess.run(
        [sys.executable, "-c", KILLING, "check", "FluxTransformer2DModel", "--tp", "2", "--json"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "rank 1: its process ended without a report (ended by SIGKILL" in json.loads(done.stdout)["issues"][0]


# In the ranks' process, rank 1 kills itself when it is to run the model.
KILLING = """
import os, signal, sys
import shardconv.checking as checking
checking.COMMAND = [sys.executable, "-c", '''
import os, signal, sys
import loader.check_ranks as ranks
real = ranks.parallelize
def parallelize(*args, **kwargs):
    if ranks.dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
ranks.parallelize = parallelize
ranks.main(sys.argv[1])
''']
from shardconv.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_cleans_up_under_a_foreign_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SIGINT has a handler that was not set from Python, which Python tells as None and cannot set again,
    a folder under construction is cleaned up as ever."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: pytest.fail("the handler would be lost"))
    with PartialFolder(tmp_path / "tp1") as partial:
        partial.create({"rank-00000-of-00001.safetensors": 10})
    assert os.listdir(tmp_path) == []
