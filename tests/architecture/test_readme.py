"""The README tells the truth where a program can check it."""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path

from small_minimax import MINIMAX_PLAN

import loader
from shardconv.cli.main import VERBS, parser
from shardconv.format.plan import Style

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_plan_it_shows_is_the_one_that_is_tested() -> None:
    """The example plan is whole, and the one whose sharded output is compared with the unsharded model's."""
    (shown,) = blocks("json")
    assert json.loads(shown) == MINIMAX_PLAN


def test_every_flag_of_convert_is_listed_and_no_other() -> None:
    """The table of flags has each of them once, and none that does not exist."""
    section = README.split("`convert` takes:\n\n")[1].split("\n\n")[0]
    listed = re.findall(r"(?<=`)--[a-z-]+", section)
    (verbs,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    flags = [option for action in verbs.choices["convert"]._actions for option in action.option_strings]
    assert sorted(listed) == sorted(flag for flag in flags if flag.startswith("--") and flag != "--help")


def test_every_verb_style_and_call_is_named() -> None:
    """Verbs, styles and the calls of `loader` each have their line."""
    assert [verb.NAME for verb in VERBS if f"`shardconv {verb.NAME} " not in README] == []
    assert [style.value for style in Style if f"| `{style.value}` |" not in README] == []
    assert [name for name in loader.__all__ if f"| `loader.{name}(" not in README] == []


def test_its_python_is_python() -> None:
    """The serving script parses."""
    for code in blocks("python"):
        ast.parse(code)


def test_nothing_is_left_to_fill_in() -> None:
    """No placeholder stands in the text."""
    assert re.findall(r"@[A-Z]+@|TODO|FIXME|XXX", README) == []
