"""Who may use whom: the table of rooms and layers in docs/design.md, held against every import of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design.md"
PACKAGES = ("shardconv", "loader")


@dataclass(frozen=True)
class Room:
    """A row of the table."""

    layer: int
    name: str  # dotted: "shardconv.format"
    uses: frozenset[str]


def table(text: str) -> dict[str, Room]:
    """The rooms of the table in `text`, by dotted name."""
    rows = re.findall(r"^\| *(\d+) *\| *`([\w/]+)` *\|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    return {
        _dotted(name): Room(
            int(layer), _dotted(name), frozenset(map(_full, filter(None, re.split(r", *", uses.strip()))))
        )
        for layer, name, uses in rows
    }


def _dotted(name: str) -> str:
    return name.replace("/", ".")


def _full(used: str) -> str:
    return used if used == "loader" else f"shardconv.{used}"


@cache
def modules() -> Mapping[str, Path]:
    """Dotted name -> file of every module."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def arrows() -> frozenset[tuple[str, str]]:
    """(module, module it uses): every import, late or for types too, and modules started by name."""
    found = set()
    for name, path in modules().items():
        for used in _used(ast.parse(path.read_text(encoding="utf-8")), name, path.name == "__init__.py"):
            module = _module_of(used)
            if module and module != name:
                found.add((name, module))
    return frozenset(found)


def _used(tree: ast.Module, name: str, is_package: bool) -> Iterator[str]:
    """Dotted names that a module imports, or has in a text from which a process is started."""
    here = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if "." in node.value and node.value in modules():  # `python -m` that
                yield node.value
            yield from re.findall(r"(?:from|import) ((?:shardconv|loader)(?:\.\w+)+)", node.value)  # `python -c` that


def _module_of(used: str) -> str | None:
    """The module that a dotted name is, or is in."""
    while used and used not in modules():
        used = used.rpartition(".")[0]
    return used or None


def room_of(module: str, rooms: Mapping[str, Room]) -> str:
    """The room that a module is in: the longest name in the table that it starts with."""
    return max((room for room in rooms if f"{module}.".startswith(f"{room}.")), key=len)


def between(rooms: Mapping[str, Room]) -> frozenset[tuple[str, str]]:
    """(room, room it uses)."""
    pairs = {(room_of(a, rooms), room_of(b, rooms)) for a, b in arrows()}
    return frozenset((a, b) for a, b in pairs if a != b)


def circles(edges: frozenset[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Groups of two or more that reach each other."""
    reach = {a: {b for x, b in edges if x == a} for a, _ in edges}
    for middle in reach:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    groups = {
        tuple(sorted(b for b in targets if a in reach.get(b, ()))) for a, targets in reach.items() if a in targets
    }
    return sorted(groups)


def longest(edges: frozenset[tuple[str, str]]) -> list[str]:
    """The longest chain of uses, without circles."""
    below: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in below:
            below[name] = []
            below[name] = max(([name, *chain(b)] for a, b in edges if a == name), key=len, default=[name])
        return below[name]

    return max((chain(name) for name, _ in edges), key=len)


ROOMS = table(DESIGN.read_text(encoding="utf-8"))


def test_every_room_uses_what_the_table_says() -> None:
    """No module uses a room that its own room's row does not name."""
    wrong = [
        f"{a} uses {b}"
        for a, b in sorted(arrows())
        if (one := room_of(a, ROOMS)) != (other := room_of(b, ROOMS)) and other not in ROOMS[one].uses
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_has_no_arrow_up_and_none_beside() -> None:
    """Every room that a row names is on a lower layer, and is in the table."""
    assert ROOMS
    wrong = [(room.name, used) for room in ROOMS.values() for used in room.uses if ROOMS[used].layer >= room.layer]
    assert not wrong


def test_the_table_claims_nothing_that_is_not_so() -> None:
    """What a row says is used is used: a row that grew too wide would forbid nothing."""
    used = between(ROOMS)
    idle = [
        (room.name, other) for room in ROOMS.values() for other in sorted(room.uses) if (room.name, other) not in used
    ]
    assert not idle


def test_no_circles() -> None:
    """No two modules use each other, directly or by way of others, inside a room or between rooms."""
    assert circles(arrows()) == []
    assert circles(between(ROOMS)) == []


def test_how_the_house_stands() -> None:
    """Prints folders, modules, arrows between folders, arrows up, circles and the longest chain (`pytest -s`)."""
    edges = between(ROOMS)
    up = [(a, b) for a, b in edges if ROOMS[b].layer >= ROOMS[a].layer]
    print(
        f"\nrooms {len(ROOMS)}, modules {len(modules())}, arrows between rooms {len(edges)}, "
        f"between modules {len(arrows())}, "
        f"up {len(up)}, circles {len(circles(arrows()))}, longest chain {len(longest(edges))} rooms, "
        f"{len(longest(arrows()))} modules: {' > '.join(longest(arrows()))}"
    )
    assert not up


def test_the_rules_above_see_what_they_forbid() -> None:
    """An import at the top, late, for types, and a module started by name are all found; a circle is."""
    source = (
        "import loader.load\nif T:\n    from .names import x\ndef f():\n    from ..engine import run\n"
        "    start(['-m', 'loader.prefetch'])\n    start(f'from shardconv.plans.planner import serve; {1}')"
    )
    found = set(_used(ast.parse(source), "shardconv.format.sets", False))
    assert {"loader.load", "shardconv.format.names.x", "shardconv.engine.run", "loader.prefetch"} <= found
    assert "shardconv.plans.planner" in found
    assert circles(frozenset({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")})) == [("a", "b", "c")]
    assert longest(frozenset({("a", "b"), ("b", "c"), ("a", "d")})) == ["a", "b", "c"]
