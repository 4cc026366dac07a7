"""docs/manifest.schema.json says what manifests are: real ones fit it, and what it refuses the reader refuses too."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from shardconv import SetError, convert
from shardconv.format.dtypes import CAST_FLOATS
from shardconv.format.manifest import Manifest
from shardconv.format.plan import Style
from shardconv.plans.catalogue import small_models

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "manifest.schema.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
GOLDEN = ROOT / "tests" / "golden"
VALIDATOR = Draft202012Validator(SCHEMA)


def faults(document: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(document)]


def properties(schema: Any) -> Iterator[str]:
    """The name of every field, at whatever depth."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for part in schema.values():
            yield from properties(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from properties(part)


@pytest.fixture
def document() -> Any:
    """A golden manifest with cut and whole tensors, packed blocks and a replicated file, to be changed."""
    return json.loads((GOLDEN / "flux/plain/tp2/shardconv.json").read_text())


def test_the_schema_is_one() -> None:
    """The file is a valid JSON schema of draft 2020-12."""
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("shardconv.json")), ids=lambda path: "-".join(path.parts[-4:-1]))
def test_golden_manifests_fit_the_schema(path: Path) -> None:
    """Manifests of sets that were written before fit, and so does what they say when it is written again."""
    raw = path.read_bytes()
    assert faults(json.loads(raw)) == []
    assert faults(json.loads(Manifest.parse(raw, path.name).to_json())) == []


@pytest.mark.slow
def test_a_fresh_manifest_fits_the_schema_and_has_every_field(tmp_path: Path) -> None:
    """What a conversion writes fits, with no field that the schema does not name, at the top or in a part."""
    small_models.build("flux").save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", tp=2, dtype="fp16")
    fresh = json.loads((tmp_path / "out/tp2/shardconv.json").read_text())
    assert faults(fresh) == []
    assert set(SCHEMA["required"]) <= set(fresh)
    assert list(fresh) == [name for name in SCHEMA["properties"] if name in fresh]
    parts = [("files", fresh["files"][0]), ("source", fresh["source"]), ("dtype", fresh["dtype"])]
    for name, part in parts:
        described = SCHEMA["properties"][name]
        assert list(part) == list(described.get("items", described)["properties"])
    known = SCHEMA["$defs"]["tensor"]["properties"]
    assert {key for tensor in fresh["tensors"] for key in tensor} == set(known)


@pytest.mark.parametrize("key", SCHEMA["required"])
def test_what_the_schema_requires_the_reader_requires(document: Any, key: str) -> None:
    """A manifest without one of its fields is refused by both."""
    del document[key]
    assert faults(document)
    with pytest.raises(SetError):
        Manifest.from_json(document, "it")


def _changed(document: Any, *path: str | int, to: Any) -> Any:
    changed = copy.deepcopy(document)
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return changed


WRONG: list[tuple[tuple[str | int, ...], Any]] = [
    (("format_version",), 2),
    (("tp_degree",), 0),
    (("tp_degree",), 65537),
    (("self_contained",), "no"),
    (("dtype", "keep_fp32"), "norm"),
    (("plan",), {}),
    (("plan", "x"), "no style"),
    (("plan", "x"), "parameter"),
    (("plan", "x"), {"style": "parameter", "blocks": [1]}),
    (("plan", "x"), {"style": "colwise", "blocks": [1]}),
    (("plan", "x"), {"style": "packed_colwise", "blocks": [0]}),
    (("plan", "x"), {"style": "packed_colwise", "blocks": [1], "dim": 0}),
    (("plan", "x"), {"style": "packed_colwise", "blocks": [1], "more": 0}),
    (("head_counts",), [-1]),
    (("aliases",), {"a": 1}),
    (("left_out",), [None]),
    (("files", 0, "name"), "../rank-00000-of-00002.safetensors"),
    (("files", 0, "nbytes"), 2**63),
    (("tensors", 0, "style"), "no style"),
    (("tensors", 0, "shape"), [-1]),
    (("tensors", 0, "dim"), 0),
    (("tensors", 0, "digests"), []),
    (("source", "repo"), 1),
    (("source", "files", 0, "metadata"), {"format": 1}),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda part: json.dumps(part).replace(" ", ""))
def test_what_the_schema_refuses_the_reader_refuses(document: Any, path: tuple[str | int, ...], value: Any) -> None:
    """A value of the wrong kind or out of range is refused by the schema, and by the reader."""
    wrong = _changed(document, *path, to=value)
    assert faults(wrong)
    with pytest.raises(SetError):
        Manifest.from_json(wrong, "it")


def test_fields_that_a_reader_does_not_know_are_passed_over(document: Any) -> None:
    """The page promises that a field that may be ignored needs no new version."""
    assert faults({**document, "later": 1}) == []
    assert Manifest.from_json({**document, "later": 1}, "it") == Manifest.from_json(document, "it")


def test_styles_and_casts_are_those_of_the_code() -> None:
    """The schema lists every style and every dtype that a conversion casts to."""
    assert all(re.fullmatch(SCHEMA["$defs"]["style"]["pattern"], style.value) for style in Style)
    assert set(SCHEMA["properties"]["dtype"]["properties"]["cast_to"]["enum"]) - {None} <= set(CAST_FLOATS)


def test_the_page_has_every_field() -> None:
    """docs/format.md names each field of the schema."""
    assert sorted({name for name in properties(SCHEMA) if f"`{name}`" not in PAGE}) == []
