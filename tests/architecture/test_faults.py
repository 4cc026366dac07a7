"""docs/faults.md and the ids in the names of tests say the same. As a script, this writes the page's last column."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "faults.md"
ROW = re.compile(r"^(\| ([A-Z]\d+) \| [^|]+ \| [^|]+ \|)([^|\n]*)\|$", re.MULTILINE)


def ids_of(name: str) -> list[str]:
    """The ids that the name of a test begins with: B6 and I4 of `test_b6_i4_what_is_missing_is_named`."""
    found = re.match(r"test_((?:[a-z]\d{1,2}_)+)", name)
    return found[1].upper().strip("_").split("_") if found else []


@cache
def carriers() -> dict[str, dict[str, int]]:
    """Id -> test file, relative to tests/ -> how many tests of it carry the id."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for each in ids_of(node.name) if isinstance(node, ast.FunctionDef) else ():
                files = found.setdefault(each, {})
                name = path.relative_to(TESTS).as_posix()
                files[name] = files.get(name, 0) + 1
    return found


def column(each: str) -> str:
    """What the last cell of an id says: files, linked, and how many tests of each."""
    files = carriers().get(each, {})
    return ", ".join(f"[{name}](../tests/{name})" + (f" {num}" if num > 1 else "") for name, num in files.items())


def test_every_id_of_a_test_is_in_the_page_and_the_other_way_round() -> None:
    """No test carries an id that nobody can look up, and nothing is promised without a test."""
    listed = [row[2] for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(carriers())


def test_the_page_names_the_tests() -> None:
    """The last column lists the files that carry the id; `python tests/architecture/test_faults.py` writes it."""
    wrong = [
        row[2] for row in ROW.finditer(PAGE.read_text(encoding="utf-8")) if row[3].strip() != column(row[2]).strip()
    ]
    assert wrong == []


def test_every_table_row_is_read() -> None:
    """A row that does not have four cells would be passed over by the tests above."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| [A-Z]\d", line)]
    assert [line for line in rows if not ROW.match(line)] == []


def test_ids_are_read_from_names() -> None:
    """One id, several, none, and a name that only begins alike."""
    assert ids_of("test_a7_b10_x") == ["A7", "B10"]
    assert ids_of("test_a_plan") == ids_of("test_fp32_x") == []


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(ROW.sub(lambda row: f"{row[1]} {column(row[2])} |", text), encoding="utf-8")
