"""The command line: argv to behaviour. stdout is data, stderr is talk, exit code 2 is usage and 1 is failure."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardconv import __version__
from shardconv.cli import convert as convert_verb
from shardconv.cli.main import VERBS, main, parser

# A new option is a deliberate change: it is added here, to docs/cli.md and to the change log.
FLAGS = {
    "convert": [
        "SOURCE", "OUT", "--help", "--tp", "--subfolder", "--variant", "--revision", "--dtype", "--plan", "--lean",
        "--self-contained", "--overwrite", "--dry-run", "--low-disk", "--only", "--whole", "--json", "--quiet",
    ],
    "inspect": ["PATH", "--help", "--tensors", "--json", "--svg"],
    "verify": ["PATH", "--help", "--source", "--json", "--quiet"],
    "reshard": [
        "PATH", "OUT", "--help", "--tp", "--self-contained", "--no-self-contained", "--overwrite", "--json", "--quiet"
    ],
    "merge": ["PATH", "OUT", "--help", "--max-shard-size", "--json", "--quiet"],
    "push": [
        "OUT", "REPO_ID", "--help", "--private", "--revision", "--create-pr", "--degrees", "--commit-message",
        "--dry-run", "--json", "--quiet",
    ],
    "plans": ["--help", "--json", "--markdown"],
    "check": ["SUBJECT", "--help", "--tp", "--plan", "--json"],
    "demo": ["--help", "--model", "--keep"],
}  # fmt: skip

JSON_KEYS = [
    "component", "folder", "already_there", "conversion_id", "model_class", "tp_degree", "self_contained", "cast_to",
    "nbytes", "set_nbytes", "rank_nbytes", "replicated_nbytes", "replicated_share", "styles", "dtypes", "files",
    "left_out", "warnings",
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small FLUX.2 transformer as diffusers saves it."""
    from shardconv.plans.catalogue import small_models

    folder = tmp_path_factory.mktemp("cli") / "source"
    small_models.build("flux2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    """The same converted for 2 ranks."""
    out = source.parent / "converted"
    assert main(["convert", "--tp", "2", "--quiet", str(source), str(out)]) == 0
    return out


class _Streams:
    """Runs commands and keeps what they said."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *argv: object) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of a command, whether it returns or leaves by argparse's way."""
        self._capfd.readouterr()
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as left:
            code = int(left.code or 0)
        out, err = self._capfd.readouterr()
        return code, out, err


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> _Streams:
    """Run a command in this process."""
    return _Streams(capfd)


# Exit codes


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "the following arguments are required: VERB"),
        (["transmogrify"], "invalid choice: 'transmogrify'"),
        (["convert", "in", "out"], "the following arguments are required: --tp"),
        (["convert", "--tp", "2", "in"], "the following arguments are required: OUT"),
        (["convert", "--tp", "two", "in", "out"], "argument --tp: invalid int value: 'two'"),
        (["convert", "--tp", "2", "--dtype", "int8", "in", "out"], "argument --dtype: invalid choice: 'int8'"),
        (["convert", "--tp", "2", "--force", "in", "out"], "unrecognized arguments: --force"),
        (["merge", "set"], "the following arguments are required: OUT"),
        (["demo", "--model", "gpt2"], "argument --model: invalid choice: 'gpt2'"),
    ],
)
def test_a_command_that_cannot_be_parsed_exits_with_2(argv: list[str], said: str, run: _Streams) -> None:
    """Missing, unknown and unreadable arguments exit with 2; usage and reason are on stderr, stdout is empty."""
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("usage: shardconv")
    assert said in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["convert", "--tp", "0", "in", "out"], "shardconv: --tp: expected a positive number of ranks, found 0\n"),
        (["convert", "--tp", "-3", "in", "out"], "shardconv: --tp: expected a positive number of ranks, found -3\n"),
        (
            ["merge", "--max-shard-size", "many", "set", "out"],
            "shardconv: --max-shard-size: expected a size such as 5GB, found 'many'\n",
        ),
        (["demo", "--keep", "/tmp"], "shardconv: --keep: /tmp exists already; name a new folder\n"),
    ],
)
def test_a_request_that_makes_no_sense_exits_with_2(argv: list[str], said: str, run: _Streams) -> None:
    """A value that cannot be meant exits with 2 and one line on stderr; stdout is empty."""
    assert run(*argv) == (2, "", said)


def test_a_subfolder_that_leads_out_exits_with_2(source: Path, tmp_path: Path, run: _Streams) -> None:
    """A component outside the source is a usage error, and nothing is written."""
    code, out, err = run("convert", "--tp", 2, "--subfolder", "../source", source, tmp_path / "out")
    assert (code, out) == (2, "")
    assert err == "shardconv: --subfolder: expected a folder inside the source, found '../source'\n"
    assert not (tmp_path / "out").exists()


def test_a_failure_exits_with_1(source: Path, converted: Path, tmp_path: Path, run: _Streams) -> None:
    """What was asked rightly but cannot be done exits with 1, its reason on stderr and nothing on stdout."""
    new = tmp_path / "new"
    failures: list[tuple[list[object], str]] = [
        (
            ["convert", "--tp", 2, tmp_path / "absent", new],
            f"{tmp_path}/absent: no such folder; give a",
        ),
        (
            ["convert", "--tp", 2, source / "config.json", new],
            f"{source}/config.json: expected a folder or",
        ),
        (["convert", "--tp", 2, "--plan", tmp_path / "p", source, new], f"{tmp_path}/p: cannot read the plan file"),
        (["convert", "--tp", 3, source, new], "config.json num_attention_heads: 8 heads, not divisible by tp degree 3"),
        (["convert", "--tp", 2, source, source], f"{source}: is the source itself"),
        (["convert", "--tp", 2, "--dtype", "bf16", source, converted], f"{converted}/tp2: "),
        (["merge", source, new], f"{source}: no converted set in it"),
        (["merge", converted, source], f"{source}: expected a new or empty folder"),
    ]
    for argv, said in failures:
        code, out, err = run(*argv)
        assert (code, out) == (1, "")
        assert said in err
        assert err.startswith("shardconv: ")
    assert not new.exists()


def test_every_fault_is_listed(source: Path, tmp_path: Path, run: _Streams) -> None:
    """Several faults are one message with a line for each."""
    plan = tmp_path / "plan.json"
    plan.write_text('{"a": "diagonal", "b": "colwise", "c": {}}')
    code, out, err = run("convert", "--tp", 2, "--plan", plan, source, tmp_path / "out")
    assert (code, out) == (1, "")
    assert re.fullmatch(rf"shardconv: 2 problems:\n  - {plan}: 'a': .*\n  - {plan}: 'c': .*\n", err)


class _Broken:
    """Stands for a verb that raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __call__(self, *args: object, **kwargs: object) -> list[object]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ZeroDivisionError("division by zero"), 1,
         "shardconv: ZeroDivisionError: division by zero (SHARDCONV_DEBUG=1 shows where)\n"),
        (OSError(5, "Input/output error"), 1, "shardconv: [Errno 5] Input/output error\n"),
        (KeyboardInterrupt(), 130, "shardconv: stopped; nothing half-done is left behind\n"),
    ],
    ids=["bug", "system", "ctrl-c"],
)  # fmt: skip
def test_no_traceback_unasked(
    error: BaseException, code: int, said: str, run: _Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of any kind is one line, a fault of ours says how to see where, and Ctrl-C exits with 130."""
    monkeypatch.setattr(convert_verb, "convert_all", _Broken(error))
    assert run("convert", "--tp", 2, "in", "out") == (code, "", said)


def test_a_traceback_when_asked(run: _Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SHARDCONV_DEBUG=1 the exception comes out as it is."""
    monkeypatch.setenv("SHARDCONV_DEBUG", "1")
    monkeypatch.setattr(convert_verb, "convert_all", _Broken(ZeroDivisionError("division by zero")))
    with pytest.raises(ZeroDivisionError):
        run("convert", "--tp", 2, "in", "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "code"), [(["convert", "--tp", "0", "a", "b"], 2), (["merge", "/nowhere", "b"], 1), (["--version"], 0)]
)
def test_exit_codes_reach_the_shell(argv: list[str], code: int, tmp_path: Path) -> None:
    """`python -m shardconv` exits with the code of the command."""
    done = subprocess.run([sys.executable, "-m", "shardconv", *argv], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code
    assert (done.stdout == "") == (code != 0)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_reader_that_went_away_is_no_crash(converted: Path, tmp_path: Path) -> None:
    """When nobody reads stdout any more, as after `| head`, the command exits with 1 and not with a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "shardconv", "merge", str(converted), str(tmp_path / "merged")]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
    assert (tmp_path / "merged" / "config.json").exists()


# Help


@pytest.mark.parametrize("verb", [None, *(verb.NAME for verb in VERBS)])
def test_help_has_an_example(verb: str | None, run: _Streams) -> None:
    """The help of the program and of each verb is on stdout and has an example that can be typed."""
    code, out, err = run(*([verb] if verb else []), "--help")
    assert (code, err) == (0, "")
    example = out.partition("\nexample:\n")[2]
    assert f"  $ shardconv {verb or 'convert'}" in example


@pytest.mark.parametrize("verb", [verb.NAME for verb in VERBS])
def test_the_examples_can_be_parsed(verb: str) -> None:
    """Every command of a verb's examples is one that the program takes."""
    module = {module.NAME: module for module in VERBS}[verb]
    commands = re.findall(r"\$ shardconv (.*?)(?:  +#.*)?$", module.EXAMPLE, re.MULTILINE)
    assert commands
    for command in commands:
        assert parser().parse_args(command.split()).run is module.run


def test_the_verbs_are_listed(run: _Streams) -> None:
    """The program's help lists each verb with its line."""
    _, out, _ = run("--help")
    for verb in VERBS:
        assert re.search(rf"^ +{verb.NAME} +{re.escape(verb.HELP[:30])}", out, re.MULTILINE)


@pytest.mark.slow
def test_help_loads_nothing_heavy() -> None:
    """No help text loads torch, diffusers or any other library that takes its time (numpy is what the engine needs)."""
    script = "import sys; from shardconv.cli.main import main\n"
    for argv in [["--help"], *([verb.NAME, "--help"] for verb in VERBS)]:
        script += f"try:\n    main({argv})\nexcept SystemExit:\n    pass\n"
    script += "print('loaded:', *sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.rpartition("loaded:")[2].split())
    assert "shardconv" in loaded
    heavy = {"torch", "diffusers", "transformers", "huggingface_hub", "safetensors", "tqdm", "scipy", "pandas", "PIL"}
    assert loaded & heavy == set()


def test_the_version(run: _Streams) -> None:
    """`--version` is the package's version."""
    assert run("--version") == (0, f"shardconv {__version__}\n", "")


def test_the_flags_are_frozen() -> None:
    """The verbs and the arguments of each are those listed here, no more and no less."""
    found = {}
    for verb in VERBS:
        alone = argparse.ArgumentParser()
        verb.add_arguments(alone)
        usage = " ".join(alone.format_usage().split())
        positional = re.findall(r" ([A-Z_]+)(?= |$)", re.sub(r"\[.*?\]|--\S+ \S+", "", usage))
        found[verb.NAME] = positional + re.findall(r"--[a-z-]+", usage.replace("-h", "--help", 1))
    assert found == FLAGS


# What convert says


def test_json_is_one_document(source: Path, tmp_path: Path, run: _Streams) -> None:
    """`--json` prints one JSON document with the documented keys, and nothing else."""
    out_folder = tmp_path / "out"
    code, out, err = run("convert", "--tp", 4, "--json", source, out_folder)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert list(document) == ["dry_run", "sets"]
    assert document["dry_run"] is False
    (one,) = document["sets"]
    assert list(one) == JSON_KEYS
    assert one["folder"] == str(out_folder / "tp4")
    assert (one["model_class"], one["tp_degree"], one["already_there"]) == ("Flux2Transformer2DModel", 4, False)
    assert one["files"] == {path.name: path.stat().st_size for path in (out_folder / "tp4").glob("*.safetensors")}
    assert one["set_nbytes"] == sum(one["files"].values())
    assert sum(style["nbytes"] for style in one["styles"].values()) == one["nbytes"]
    assert sum(style["rank_nbytes"] for style in one["styles"].values()) == one["rank_nbytes"]
    assert one["nbytes"] == one["replicated_nbytes"] + 4 * (one["rank_nbytes"] - one["replicated_nbytes"])
    manifest = json.loads((out_folder / "tp4" / "shardconv.json").read_text())
    assert one["conversion_id"] == manifest["conversion_id"]


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path, run: _Streams) -> None:
    """`--dry-run` says what would be written, in the same figures as the conversion, and touches no file."""
    code, dry, _ = run("convert", "--tp", 2, "--dry-run", "--json", source, tmp_path / "out")
    assert code == 0
    assert not (tmp_path / "out").exists()
    _, wet, _ = run("convert", "--tp", 2, "--json", source, tmp_path / "out")
    planned, done = json.loads(dry), json.loads(wet)
    assert (planned.pop("dry_run"), done.pop("dry_run")) == (True, False)
    assert planned["sets"][0].pop("conversion_id") == ""
    assert planned["sets"][0].pop("degrees") == [1, 2, 4, 8]
    sizes = planned["sets"][0].pop("rank_nbytes_by_plan")
    assert sizes["plain"] == done["sets"][0]["rank_nbytes"]
    assert sizes["lean"] < sizes["plain"]
    assert len(done["sets"][0].pop("conversion_id")) == 32
    assert planned == done


def test_text_names_the_folder_and_what_happened(source: Path, tmp_path: Path, run: _Streams) -> None:
    """The text begins with the folder, the class and what was done; a second run says that nothing was to do."""
    folder = tmp_path / "out" / "tp2"
    start = f"{folder}: Flux2Transformer2DModel, tp degree 2, "
    _, out, err = run("convert", "--tp", 2, "--dry-run", source, tmp_path / "out")
    assert (out.splitlines()[0], err) == (start + "would be written", "")
    _, out, err = run("convert", "--tp", 2, source, tmp_path / "out")
    assert (out.splitlines()[0], err) == (start + "written", "")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    code, out, err = run("convert", "--tp", 2, source, tmp_path / "out")
    assert (code, out.splitlines()[0], err) == (0, start + "there already, unchanged", "")
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert "of 2 ranks holds 1/" in out
    assert "stays replicated" in out


def test_quiet_says_nothing(source: Path, tmp_path: Path, run: _Streams) -> None:
    """`--quiet` prints nothing when all is well, only the document together with `--json`, and errors as ever."""
    (source / "notes.bin").write_bytes(b"x")  # which the conversion warns about
    try:
        assert run("convert", "--tp", 2, "--quiet", source, tmp_path / "a") == (0, "", "")
        code, out, err = run("convert", "--tp", 2, "--quiet", "--json", source, tmp_path / "b")
        assert (code, err, len(json.loads(out)["sets"][0]["warnings"])) == (0, "", 1)
        code, out, err = run("convert", "--tp", 2, "--json", source, tmp_path / "c")
    finally:
        (source / "notes.bin").unlink()
    assert code == 0
    assert err.startswith("warning: ")
    assert "notes.bin" in err
    assert json.loads(out)["sets"][0]["warnings"][0] == err.removeprefix("warning: ").rstrip("\n")
    assert run("convert", "--tp", 3, "--quiet", source, tmp_path / "d")[0] == 1


def _on_a_terminal(command: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """(exit code, what a terminal on stderr showed) of a command."""
    terminal, ours = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))  # rows, columns
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(terminal, 4096):
                shown.append(data)
        except OSError:  # what Linux says when the other side is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    with open(ours, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        code = command()
        monkeypatch.undo()
    reader.join()
    os.close(terminal)
    return code, b"".join(shown).decode()


def test_progress_is_for_terminals(
    source: Path, tmp_path: Path, run: _Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress is shown on a terminal and ends at all bytes; in a pipe, and with `--quiet`, there is none."""
    argv = ["convert", "--tp", "2", str(source), str(tmp_path / "out"), "--overwrite"]
    code, shown = _on_a_terminal(lambda: main(argv), monkeypatch)
    assert code == 0
    assert "convert: 100%" in shown
    assert "B/s" in shown
    quiet = [*argv[:-2], str(tmp_path / "out2"), "--quiet"]
    assert _on_a_terminal(lambda: main(quiet), monkeypatch) == (0, "")
    code, _, err = run(*argv[:-2], tmp_path / "out3")
    assert (code, err) == (0, "")


# What merge says


def test_merge_names_its_files(converted: Path, source: Path, tmp_path: Path, run: _Streams) -> None:
    """`merge` prints the path of each file that it wrote, and nothing with `--quiet`."""
    code, out, err = run("merge", converted, tmp_path / "merged")
    assert (code, err) == (0, "")
    assert sorted(out.split()) == sorted(str(path) for path in (tmp_path / "merged").iterdir())
    assert (tmp_path / "merged" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert run("merge", "--quiet", converted / "tp2", tmp_path / "again") == (0, "", "")


def test_merge_keeps_to_the_size(converted: Path, tmp_path: Path, run: _Streams) -> None:
    """`--max-shard-size` makes several files with an index, none above the size."""
    assert run("merge", "--max-shard-size", "2MB", converted, tmp_path / "merged")[0] == 0
    sizes = [path.stat().st_size for path in (tmp_path / "merged").glob("*.safetensors")]
    assert len(sizes) > 3
    assert max(sizes) < 2_000_000 + 100_000  # header included
    assert (tmp_path / "merged" / "diffusion_pytorch_model.safetensors.index.json").exists()
