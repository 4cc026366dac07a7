"""What people have in their scripts: names, verbs, flags, exit codes, as recorded; nothing that stands there may go."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import loader
import shardconv
from shardconv.cli.main import main, parser

RECORDED = json.loads(Path(__file__).with_name("public_names.json").read_text())


def flags(of: argparse.ArgumentParser) -> list[str]:
    """Flags and names of positional arguments, as they are typed."""
    names = [action.option_strings or [action.metavar or action.dest] for action in of._actions]
    return sorted(str(name) for each in names for name in each)


def verbs() -> dict[str, list[str]]:
    """Verb -> its flags."""
    (choices,) = [each.choices for each in parser()._actions if isinstance(each, argparse._SubParsersAction)]
    return {name: flags(verb) for name, verb in sorted(choices.items())}


def current() -> dict[str, Any]:
    return {"shardconv": sorted(shardconv.__all__), "loader": sorted(loader.__all__), "verbs": verbs()}


def test_names_verbs_and_flags_are_those_recorded() -> None:
    """Whoever adds or drops one says so in the list."""
    assert current() == RECORDED


@pytest.mark.parametrize("package", ["shardconv", "loader"])
def test_every_public_name_is_there(package: str) -> None:
    """Each name of `__all__` can be taken, is shown by `dir`, and tells where it belongs when it is misspelt."""
    module = {"shardconv": shardconv, "loader": loader}[package]
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'convrt'"):
        _ = module.convrt


def test_exit_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """0 when it worked, 1 when it failed, 2 when the command line makes no sense."""
    assert main(["plans", "FluxTransformer2DModel"]) == 0
    assert main(["inspect", str(tmp_path)]) == 1
    for argv in (["convert", "--tp", "0", "a", "b"], ["nothing"]):
        try:
            code = main(argv)
        except SystemExit as asked_wrongly:
            code = int(asked_wrongly.code or 0)
        assert code == 2
    capsys.readouterr()


@pytest.mark.slow
def test_modules_that_are_started_by_name(tmp_path: Path) -> None:
    """`python -m shardconv` and `python -m loader.prefetch PATH -- SCRIPT` keep their names."""
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    for argv in (["shardconv", "--version"], ["loader.prefetch", str(tmp_path), "--", str(script)]):
        done = subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True, check=True)
        assert done.stdout.strip() in (f"shardconv {shardconv.__version__}", "ran")


def test_importing_costs_nothing() -> None:
    """`import shardconv` and `import loader` load nothing of ours that works and only the standard library."""
    code = (
        "import sys; before = set(sys.modules); import shardconv, loader; new = set(sys.modules) - before;"
        "names = {name.partition('.')[0] for name in new} - set(sys.stdlib_module_names);"
        "print(*sorted(names), *sorted(name for name in new if name.startswith('shardconv.')))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["loader", "shardconv", "shardconv._version"]


ROOT = Path(__file__).parents[2]
