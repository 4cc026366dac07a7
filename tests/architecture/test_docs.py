"""The pages tell the truth where a program can check it: links, code, flags, classes, modules, calls."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_minimax import MINIMAX_PLAN

import loader
import shardconv
from shardconv.cli.main import VERBS, parser
from shardconv.cli.plans import PAGE_HEAD, PAGE_TAIL, as_cells
from shardconv.commands.plans import added_classes, class_names, class_row, encoder_classes, released_models
from shardconv.format.plan import Style
from shardconv.plans.catalogue.released import RELEASED

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
}
COMPILED_ONLY = (
    "<!-- compiled only: "  # stands in the line before a block that needs a group, a network or a large model
)
SNIPPETS = {
    f"{page}-{number}": (code, bool(mark))
    for page, text in PAGES.items()
    for number, (mark, code) in enumerate(
        re.findall(rf"^({COMPILED_ONLY}[^\n]*\n)?```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    )
}


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """What can stand after # in a link to a page: its headings, as GitHub and others make anchors of them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> Iterator[str]:
    """The targets of a page's links and images that lead nowhere else than into the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(PAGES[page])):
        if not target.startswith(("http://", "https://", "mailto:")):
            yield target


def fault(page: str, target: str) -> str | None:
    """Why a link does not lead anywhere; None when it does."""
    name, _, anchor = target.partition("#")
    path = ((ROOT / page).parent / name).resolve() if name else ROOT / page
    if not path.exists() or not path.is_relative_to(ROOT):
        return f"{page}: {target}: no such file in the repository"
    if anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
        return f"{page}: {target}: no such heading"
    return None


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    """Each relative link names a file of the repository, and a heading of it where it has an anchor."""
    assert [found for target in links(page) if (found := fault(page, target))] == []


def test_links_that_lead_nowhere_are_seen() -> None:
    """The test above finds a missing file, a missing heading and a way out of the repository."""
    assert fault("docs/cli.md", "plans.md#styles") is None
    assert fault("docs/cli.md", "#shardconv-merge-path-out") is None
    for target in ("missing.md", "plans.md#missing", "#missing", "../../outside.md", "/etc/passwd"):
        assert fault("docs/cli.md", target) is not None


def test_every_page_can_be_reached() -> None:
    """The README links every page of docs/, the schema and the pages beside it."""
    linked = {target.partition("#")[0] for target in links("README.md")}
    assert sorted(set(PAGES) - {"README.md"} - linked) == []
    assert "docs/manifest.schema.json" in linked


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    """A path of this repository in backticks is one that is there."""
    named = re.findall(r"`((?:shardconv|loader|tests|docs|benchmarks)/[\w/.]*)`", prose(PAGES[page]))
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()] == []


@pytest.mark.parametrize("name", SNIPPETS)
def test_python_compiles(name: str) -> None:
    """Every `python` block is Python."""
    ast.parse(SNIPPETS[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, compiled_only) in SNIPPETS.items() if not compiled_only])
def test_python_runs(name: str, tmp_path: Path) -> None:
    """Every `python` block that is not marked runs, alone, in an empty folder."""
    done = subprocess.run(
        [sys.executable, "-c", SNIPPETS[name][0]], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_is_short() -> None:
    """The README is one that is read: at most 8 KiB."""
    assert (ROOT / "README.md").stat().st_size <= 8192


def test_nothing_is_left_to_fill_in() -> None:
    """No placeholder stands in a page."""
    assert {
        page: found for page, text in PAGES.items() if (found := re.findall(r"@[A-Z]+@|TODO|FIXME|XXX", text))
    } == {}


def test_every_verb_is_in_the_readme() -> None:
    """Each verb has its line."""
    assert [verb.NAME for verb in VERBS if f"| `shardconv {verb.NAME}" not in PAGES["README.md"]] == []


def sections() -> dict[str, tuple[list[str], list[str]]]:
    """Verb -> the arguments and the flags that docs/cli.md gives it."""
    found = {}
    for title, body in re.findall(
        r"^## `shardconv (.*?)`\n(.*?)(?=^## |\Z)", PAGES["docs/cli.md"], re.DOTALL | re.MULTILINE
    ):
        verb, *arguments = title.split()
        cells = re.findall(r"^\| (`--.*?) \|", body, re.MULTILINE)
        found[verb] = arguments, [flag for cell in cells for flag in re.findall(r"`(--[a-z-]+)", cell)]
    return found


def test_the_command_line_page_is_the_parser() -> None:
    """Each verb has its section, with the arguments in their order and every flag once, and no other."""
    (verbs,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    expected = {
        name: (
            [str(action.metavar) for action in sub._actions if not action.option_strings],
            sorted(flag for action in sub._actions for flag in action.option_strings if flag not in ("-h", "--help")),
        )
        for name, sub in verbs.choices.items()
    }
    assert {verb: (arguments, sorted(flags)) for verb, (arguments, flags) in sections().items()} == expected
    assert "`shardconv --version`" in PAGES["docs/cli.md"]


def test_choices_of_flags_are_listed() -> None:
    """What a flag may be given stands in its row."""
    (verbs,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    missing = [
        choice
        for sub in verbs.choices.values()
        for action in sub._actions
        for choice in action.choices or ()
        if str(choice) not in PAGES["docs/cli.md"]
    ]
    assert missing == []


def test_the_page_of_classes_is_of_this_catalogue() -> None:
    """Around the lines, docs/classes.md is what `shardconv plans --markdown` prints; each class has its line."""
    page = PAGES["docs/classes.md"]
    lines = re.findall(r"^\| \w+ \| \d.*\n", page, re.MULTILINE)
    head = PAGE_HEAD.format(
        added=added_classes(), total=len(class_names()), encoders=encoder_classes(), released=released_models()
    )
    assert page == head + "".join(lines) + PAGE_TAIL + "\n"
    assert [line.split()[1] for line in lines] == class_names()


@pytest.mark.slow
def test_the_lines_of_classes_are_what_the_command_prints() -> None:
    """Each line of docs/classes.md is of today's plans. Those of released models, which cost as much again, are
    compared where their rows are made, in tests/plans/catalogue/test_released.py."""
    released = {each.model_class for each in RELEASED.values()}
    lines = PAGES["docs/classes.md"].splitlines()
    assert [
        line for name in class_names() if name not in released and (line := as_cells(class_row(name))) not in lines
    ] == []


def listed_modules() -> list[str]:
    """The files that docs/development.md has a line for."""
    found = []
    for folder, body in re.findall(
        r"^### `((?:shardconv|loader)[\w/]*)`\n(.*?)(?=^#|\Z)", PAGES["docs/development.md"], re.DOTALL | re.MULTILINE
    ):
        found += [f"{folder}/{name}" for name in re.findall(r"^- `(\w+\.py)`: \S", body, re.MULTILINE)]
    return found


def test_every_module_has_its_line() -> None:
    """docs/development.md lists each file of both packages once, and no other; a package's bare `__init__.py` is its
    heading."""
    there = [
        path.relative_to(ROOT).as_posix()
        for package in ("shardconv", "loader")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py" or len(ast.parse(path.read_text(encoding="utf-8")).body) > 1
    ]
    assert sorted(listed_modules()) == sorted(there)


def test_the_plan_it_shows_is_the_one_that_is_tested() -> None:
    """The example plan is whole, and the one whose sharded output is compared with the unsharded model's."""
    (shown,) = re.findall(r"```json\n(.*?)```", PAGES["docs/plans.md"], re.DOTALL)
    assert json.loads(shown) == MINIMAX_PLAN


def test_every_style_has_its_row() -> None:
    """The table of styles has each of them once."""
    rows = re.findall(r"^\| `(\w+)` \|", PAGES["docs/plans.md"], re.MULTILINE)
    assert rows == [style.value for style in Style]


def calls() -> dict[str, str]:
    """Call -> its arguments, as docs/python.md shows them."""
    return dict(
        re.findall(r"^\| `((?:shardconv|loader)\.\w+)\((.*?)\)[^`]*` \|", PAGES["docs/python.md"], re.MULTILINE)
    )


def test_every_call_and_error_is_named() -> None:
    """What the two packages offer has its row, or is named in the text."""
    assert [name for name in loader.__all__ if f"loader.{name}" not in calls()] == []
    others = [name for name in shardconv.__all__ if f"shardconv.{name}" not in calls()]
    assert [name for name in others if name not in PAGES["docs/python.md"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("call", calls())
def test_calls_have_the_arguments_that_are_shown(call: str) -> None:
    """Each argument of a row is one of the function's, with that default."""
    package, name = call.split(".")
    parameters = inspect.signature(getattr(shardconv if package == "shardconv" else loader, name)).parameters
    shown = [part for part in calls()[call].split(", ") if part not in ("*", "...")]
    for part in shown:
        argument, _, default = part.partition("=")
        parameter = parameters[argument.removeprefix("**")]
        found = None if parameter.default is parameter.empty else parameter.default
        assert found == (eval(default) if default else None), part
