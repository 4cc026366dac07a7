"""`shardconv.format.manifest`: one record, one text; and nothing that was edited or damaged is taken for a manifest."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardconv.errors import SetError
from shardconv.format.cut import Cut
from shardconv.format.layout import StoredTensor, plan_layout
from shardconv.format.manifest import MANIFEST_NAME, FileRecord, Manifest, Source, SourceFileRecord
from shardconv.format.names import REPLICATED_FILE
from shardconv.format.plan import REPLICATED, Rule, Style


def _manifest(self_contained: bool = False) -> Manifest:
    """A manifest with something in every field."""
    tensors = (
        StoredTensor("proj.weight", "BF16", (8, 4), "packed_colwise", Cut(0, (4, 4))),
        StoredTensor("out.weight", "BF16", (4, 8), "rowwise", Cut(1, (8,))),
        StoredTensor("out.bias", "BF16", (4,), "rowwise", None),
        StoredTensor("norm.weight", "F32", (8,), REPLICATED, None),
    )
    layout = plan_layout(tensors, 2, self_contained)
    manifest = Manifest(
        tool_version="0.1.0",
        conversion_id="",
        source=Source(
            "org/name",
            "c0ffee",
            "transformer",
            "fp16",
            (
                SourceFileRecord("a.safetensors", 4000, "1" * 32, "2" * 32, {"format": "pt", "ключ": "значение"}),
                SourceFileRecord("b.safetensors", 5000, "3" * 32, "4" * 32, {}),
            ),
        ),
        model_class="FluxTransformer2DModel",
        config_digest="0" * 32,
        library_name="diffusers",
        library_version="0.42.1",
        tp_degree=2,
        self_contained=self_contained,
        cast_to="BF16",
        keep_fp32=("norm",),
        plan={"blocks.*.proj": Rule(Style.PACKED_COLWISE, (1, 1)), "blocks.*.out": Rule(Style.ROWWISE)},
        head_counts=(2, 8),
        tensors=tensors,
        digests={
            "proj.weight": ("5" * 32, "6" * 32),
            "out.weight": ("7" * 32, "8" * 32),
            "out.bias": ("9" * 32,),
            "norm.weight": ("a" * 32,),
        },
        aliases={"tied.weight": "norm.weight"},
        left_out=("ema.weight",),
        files=tuple(FileRecord(file.name, file.rank, file.nbytes, "b" * 32) for file in layout.files),
    )
    return replace(manifest, conversion_id=manifest.identity())


def _document() -> Any:
    return json.loads(_manifest().to_json())


# One record, one text


@pytest.mark.parametrize("self_contained", [False, True])
def test_reading_gives_back_what_was_written(self_contained: bool, tmp_path: Path) -> None:
    """A manifest read from its own text, or from the file of it, is the manifest."""
    manifest = _manifest(self_contained)
    assert Manifest.from_json(json.loads(manifest.to_json()), "m") == manifest
    (tmp_path / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    assert Manifest.read(tmp_path) == manifest


def test_absent_values_are_kept_apart_from_empty_ones() -> None:
    """None and the empty string survive as themselves."""
    manifest = _manifest()
    source = replace(manifest.source, repo=None, revision=None, subfolder="", variant=None)
    manifest = replace(manifest, source=source, cast_to=None)
    manifest = replace(manifest, conversion_id=manifest.identity())
    assert Manifest.from_json(json.loads(manifest.to_json()), "m") == manifest


def test_the_text_is_always_the_same() -> None:
    """Equal manifests have equal texts, a line for each tensor and file, and reading and writing changes no byte."""
    text = _manifest().to_json()
    assert text == _manifest().to_json()
    assert text == Manifest.from_json(json.loads(text), "m").to_json()
    assert sum(line.startswith('{"name"') for line in text.splitlines()) == 4 + 3


def test_what_a_set_is_called_does_not_change_its_id() -> None:
    """The same bytes from another repo, or by another version of the tools, are the same conversion."""
    manifest = _manifest()
    other = replace(
        manifest,
        tool_version="9.9.9",
        library_version="1.0.0",
        source=replace(manifest.source, repo=None, revision="main", subfolder=None, variant=None),
    )
    assert other.identity() == manifest.conversion_id


@pytest.mark.parametrize(
    "change",
    [
        {"tp_degree": 4},
        {"self_contained": True},
        {"cast_to": None},
        {"keep_fp32": ()},
        {"model_class": "Flux2Transformer2DModel"},
        {"plan": {"blocks.*.proj": Rule(Style.COLWISE), "blocks.*.out": Rule(Style.ROWWISE)}},
        {"head_counts": (8,)},
        {"aliases": {}},
        {"left_out": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_e6_what_a_set_is_changes_its_id(change: dict[str, Any]) -> None:
    """Each thing that was asked for or found is part of the conversion id (E6)."""
    assert replace(_manifest(), **change).identity() != _manifest().conversion_id


# Tampering

Tamper = Callable[[Any], object]

TAMPERED: dict[str, Tamper] = {
    "shape": lambda d: d["tensors"][0].update(shape=[4, 8]),
    "shape of a whole tensor": lambda d: d["tensors"][3].update(shape=[16]),
    "negative shape": lambda d: d["tensors"][3].update(shape=[-8]),
    "bool in a shape": lambda d: d["tensors"][3].update(shape=[True]),
    "float in a shape": lambda d: d["tensors"][3].update(shape=[8.0]),
    "huge shape": lambda d: d["tensors"][3].update(shape=[2**63]),
    "shape of astronomic product": lambda d: d["tensors"][3].update(shape=[2**62] * 400),
    "shape is no list": lambda d: d["tensors"][3].update(shape=8),
    "dtype": lambda d: d["tensors"][3].update(dtype="I32"),
    "unknown dtype": lambda d: d["tensors"][3].update(dtype="F7"),
    "dtype is no text": lambda d: d["tensors"][3].update(dtype=["F32"]),
    "style": lambda d: d["tensors"][1].update(style="rowwise_split_input"),
    "unknown style": lambda d: d["tensors"][1].update(style="diagonal"),
    "dim": lambda d: d["tensors"][1].update(dim=0),
    "dim beyond the shape": lambda d: d["tensors"][1].update(dim=2),
    "negative dim": lambda d: d["tensors"][1].update(dim=-1),
    "no dim": lambda d: d["tensors"][1].pop("dim"),
    "dim of a whole tensor": lambda d: d["tensors"][3].update(dim=0, block_sizes=[8]),
    "block sizes": lambda d: d["tensors"][0].update(block_sizes=[2, 6]),
    "block sizes that the degree does not divide": lambda d: d["tensors"][0].update(block_sizes=[3, 5]),
    "block sizes of another sum": lambda d: d["tensors"][0].update(block_sizes=[4, 8]),
    "negative block sizes": lambda d: d["tensors"][0].update(block_sizes=[-4, 12]),
    "slice digest": lambda d: d["tensors"][0]["digests"].__setitem__(1, "0" * 32),
    "slice digests swapped": lambda d: d["tensors"][0]["digests"].reverse(),
    "slice digest missing": lambda d: d["tensors"][0]["digests"].pop(),
    "slice digest too many": lambda d: d["tensors"][3]["digests"].append("0" * 32),
    "slice digest is no text": lambda d: d["tensors"][3].update(digests=[7]),
    "tensor renamed": lambda d: d["tensors"][3].update(name="norm.weights"),
    "tensor twice": lambda d: d["tensors"].append(d["tensors"][3]),
    "tensor removed": lambda d: d["tensors"].pop(),
    "tensors swapped": lambda d: d["tensors"].reverse(),
    "tensors is no list": lambda d: d.update(tensors={}),
    "lone surrogate in a tensor name": lambda d: d["tensors"][3].update(name="\ud800"),
    "lone surrogate in the class": lambda d: d.update(model_class="\ud800"),
    "file name leads out": lambda d: d["files"][0].update(name="../rank-00000-of-00002.safetensors"),
    "absolute file name": lambda d: d["files"][0].update(name="/etc/passwd"),
    "file name of another degree": lambda d: d["files"][0].update(name="rank-00000-of-00004.safetensors"),
    "files swapped": lambda d: d["files"].reverse(),
    "rank twice": lambda d: d["files"].__setitem__(1, d["files"][0]),
    "rank too many": lambda d: d["files"].append(
        {**d["files"][1], "rank": 2, "name": "rank-00002-of-00002.safetensors"}),
    "rank is no number": lambda d: d["files"][1].update(rank="1"),
    "rank is a bool": lambda d: d["files"][1].update(rank=True),
    "negative rank": lambda d: d["files"][1].update(rank=-1),
    "file removed": lambda d: d["files"].pop(0),
    "shared file removed": lambda d: d["files"].pop(),
    "file nbytes": lambda d: d["files"][0].update(nbytes=1),
    "negative nbytes": lambda d: d["files"][0].update(nbytes=-4160),
    "header digest is no text": lambda d: d["files"][0].update(header_digest=None),
    "plan": lambda d: d["plan"].update({"blocks.*.out": "colwise"}),
    "plan of an unknown style": lambda d: d["plan"].update({"blocks.*.out": "diagonal"}),
    "empty plan": lambda d: d.update(plan={}),
    "plan is a list": lambda d: d.update(plan=[]),
    "degree": lambda d: d.update(tp_degree=1),
    "degree 0": lambda d: d.update(tp_degree=0),
    "huge degree": lambda d: d.update(tp_degree=2**40),
    "degree is a bool": lambda d: d.update(tp_degree=True),
    "degree is text": lambda d: d.update(tp_degree="2"),
    "self_contained": lambda d: d.update(self_contained=True),
    "self_contained is a number": lambda d: d.update(self_contained=0),
    "cast": lambda d: d["dtype"].update(cast_to="F16"),
    "kept in fp32": lambda d: d["dtype"].update(keep_fp32=[]),
    "kept in fp32 is text": lambda d: d["dtype"].update(keep_fp32="norm"),
    "dtype policy is null": lambda d: d.update(dtype=None),
    "conversion id": lambda d: d.update(conversion_id="0" * 32),
    "no conversion id": lambda d: d.update(conversion_id=""),
    "conversion id is no text": lambda d: d.update(conversion_id=[]),
    "class": lambda d: d.update(model_class="QwenImageTransformer2DModel"),
    "alias": lambda d: d["aliases"].update({"tied.weight": "out.bias"}),
    "aliases are a list": lambda d: d.update(aliases=[]),
    "alias is no text": lambda d: d["aliases"].update({"tied.weight": 1}),
    "left out": lambda d: d.update(left_out=[]),
    "source file name": lambda d: d["source"]["files"][0].update(name="c.safetensors"),
    "source digest": lambda d: d["source"]["files"][0].update(digest="0" * 32),
    "source nbytes": lambda d: d["source"]["files"][0].update(nbytes=4001),
    "source nbytes negative": lambda d: d["source"]["files"][0].update(nbytes=-1),
    "source metadata of numbers": lambda d: d["source"]["files"][0].update(metadata={"a": 1}),
    "source is text": lambda d: d.update(source="org/name"),
    "source repo is a number": lambda d: d["source"].update(repo=1),
    "tool is null": lambda d: d.update(tool=None),
    "library version is a number": lambda d: d["library"].update(version=0.42),
    "format version 0": lambda d: d.update(format_version=0),
    "format version is a bool": lambda d: d.update(format_version=True),
    "format version is text": lambda d: d.update(format_version="1"),
    "format version is null": lambda d: d.update(format_version=None),
}  # fmt: skip


@pytest.mark.parametrize("kind", TAMPERED)
def test_an_edited_manifest_is_refused(kind: str) -> None:
    """Each kind of edit is one `SetError` that names the manifest and says what to do."""
    document = _document()
    TAMPERED[kind](document)
    assert json.dumps(document) != json.dumps(_document())  # the edit is one
    with pytest.raises(SetError) as caught:
        Manifest.from_json(document, "out/tp2/shardconv.json")
    (issue,) = caught.value.issues
    assert issue.startswith("out/tp2/shardconv.json: ")
    assert issue.endswith("; fetch or convert again")


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every value in a document, the document itself left out."""
    if not isinstance(value, (dict, list)):
        return []
    children = value.items() if isinstance(value, dict) else enumerate(value)
    return [place for key, child in children for place in [(*path, key), *_paths(child, (*path, key))]]


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def _is_key(path: tuple[Any, ...]) -> bool:
    """Whether a place is a key of the format that is read: no item of a list, no name in a map of names, no label."""
    labels = (("tool", "name"), ("library", "name"))
    return isinstance(path[-1], str) and path not in labels and not {"plan", "aliases", "metadata"} & set(path[:-1])


_KEYS = [path for path in _paths(_document()) if _is_key(path)]


@pytest.mark.parametrize("path", _KEYS, ids=[".".join(map(str, path)) for path in _KEYS])
def test_every_key_is_needed(path: tuple[Any, ...]) -> None:
    """A manifest that lacks any one of its keys is refused."""
    document = _document()
    del _at(document, path[:-1])[path[-1]]
    with pytest.raises(SetError):
        Manifest.from_json(document, "m")


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from([2**63, 2**64, -(2**63), 65536]) | st.floats()
    | st.text(max_size=4) | st.sampled_from(["..", "\ud800", "colwise", "replicated", "BF16", REPLICATED_FILE]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
_places = st.sampled_from(_paths(_document()))


def _read_or_refuse(document: Any) -> Manifest | SetError:
    try:
        return Manifest.from_json(document, "m")
    except SetError as error:
        return error


def _told_only(manifest: Manifest) -> Manifest:
    """`manifest` with all that merely tells where it came from, and is under no digest, as the original has it."""
    original = _manifest()
    files = [
        replace(mine, header_digest=his.header_digest, metadata=his.metadata)
        for mine, his in zip(manifest.source.files, original.source.files, strict=True)
    ]
    return replace(
        manifest,
        tool_version=original.tool_version,
        library_name=original.library_name,
        library_version=original.library_version,
        source=replace(original.source, files=tuple(files)),
        files=tuple(
            replace(mine, header_digest=his.header_digest)
            for mine, his in zip(manifest.files, original.files, strict=True)
        ),
    )


@settings(deadline=None, max_examples=150)
@given(_places, _values, st.sampled_from(["set", "delete", "double"]))
def test_no_single_edit_is_taken(path: tuple[Any, ...], value: Any, how: str) -> None:
    """Any one value replaced, removed or doubled is a `SetError`, or told only where the set came from."""
    document = _document()
    holder = _at(document, path[:-1])
    if how == "set":
        holder[path[-1]] = value
    elif how == "delete":
        del holder[path[-1]]
    elif isinstance(holder, list):
        holder.insert(path[-1], copy.deepcopy(holder[path[-1]]))
    read = _read_or_refuse(document)
    if isinstance(read, Manifest):
        assert _told_only(read) == _manifest()


@settings(deadline=None, max_examples=150)
@given(_values | st.dictionaries(st.sampled_from(sorted(_document())), _values))
def test_no_document_escapes(document: Any) -> None:
    """Whatever JSON holds, it is refused as a `SetError` that names the manifest."""
    with pytest.raises(SetError, match=r"^m: "):
        Manifest.from_json(document, "m")


def test_a_document_of_great_depth_is_refused() -> None:
    """A value nested deeper than Python recurses is a `SetError`, wherever it stands."""
    deep: Any = []
    for _ in range(sys.getrecursionlimit() + 100):
        deep = [deep]
    for key in _document():
        if key != "format_version":
            with pytest.raises(SetError, match=r"^m: "):
                Manifest.from_json({**_document(), key: deep}, "m")


def test_a_shape_of_many_huge_sizes_is_refused_at_once() -> None:
    """A hostile shape costs no time: 30,000 sizes of 2**62 are refused without multiplying all of them."""
    document = _document()
    document["tensors"][3]["shape"] = [2**62 + 1] * 30_000
    start = time.process_time()
    with pytest.raises(SetError):
        Manifest.from_json(document, "m")
    assert time.process_time() - start < 2  # seconds; all of them take more, and time grows with their square


def test_a_degree_without_its_files_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A degree that the list of files does not bear out is refused before anything of that many ranks is laid out."""
    document = _document()
    document.update(tp_degree=65536, tensors=[document["tensors"][3]], files=[])
    monkeypatch.setattr(Manifest, "layout", lambda self: pytest.fail("laid out"))
    with pytest.raises(SetError, match=r"^m: "):
        Manifest.from_json(document, "m")


def test_more_slices_than_any_model_has_are_not_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small manifest of many tensors, each whole in each of many files, would take hours to lay out: refused."""
    document = _document()
    ranks, names = range(2000), range(2000)
    document.update(
        tp_degree=len(ranks),
        self_contained=True,
        tensors=[{**document["tensors"][3], "name": str(name)} for name in names],
        files=[
            {**document["files"][0], "rank": rank, "name": f"rank-{rank:05d}-of-02000.safetensors"} for rank in ranks
        ],
    )
    monkeypatch.setattr(Manifest, "layout", lambda self: pytest.fail("laid out"))
    with pytest.raises(SetError, match=r"2000 tensors for 2000 ranks, at most 500000 slices are laid out"):
        Manifest.from_json(document, "m")


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_a_cut_through_a_byte_is_refused(dtype: str) -> None:
    """Of a dtype with several elements in a byte no slice can be read (found by fuzzing, as a division by 0)."""
    document = _document()
    row = next(row for row in document["tensors"] if "dim" in row)
    row["dtype"] = dtype
    with pytest.raises(SetError, match=f"cut, though {dtype} has several elements in a byte"):
        Manifest.from_json(document, "m")


# Other versions, other files


@pytest.mark.parametrize("version", [2, 10, 2**70])
def test_a_newer_format_says_so(version: int) -> None:
    """A manifest of a newer format asks for a newer shardconv, whatever else it holds."""
    for document in ({"format_version": version}, {**_document(), "format_version": version, "tensors": "elsewhere"}):
        with pytest.raises(SetError) as caught:
            Manifest.from_json(document, "m")
        assert str(caught.value) == f"m: format version {version}, this shardconv reads 1; upgrade shardconv"


def test_unknown_keys_are_let_pass() -> None:
    """A later release of the same format may add keys; this one reads the manifest all the same."""
    document = {**_document(), "note": "made on a Tuesday"}
    assert Manifest.from_json(document, "m") == _manifest()


def test_e2_a_missing_manifest_says_what_that_means(tmp_path: Path) -> None:
    """A folder without a manifest is not a complete set, and the message says so (E2)."""
    with pytest.raises(SetError) as caught:
        Manifest.read(tmp_path)
    assert str(caught.value) == f"{tmp_path}: no shardconv.json, so not a complete set; convert again"


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff\xfe\xff", b"nonsense", b"[" * 100_000, b'{"tp_degree": ' + b"9" * 5000 + b"}"]
)
def test_a_manifest_that_is_not_json_is_refused(raw: bytes, tmp_path: Path) -> None:
    """A manifest cut short, garbled or nested beyond reason is a `SetError` that names the file."""
    (tmp_path / MANIFEST_NAME).write_bytes(raw)
    with pytest.raises(SetError) as caught:
        Manifest.read(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / MANIFEST_NAME}: not JSON (")
    assert str(caught.value).endswith("); fetch or convert again")


def test_a_manifest_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """A manifest cut short at any byte is a `SetError`."""
    raw = _manifest().to_json().encode()
    for length in range(0, len(raw) - 2, 7):
        (tmp_path / MANIFEST_NAME).write_bytes(raw[:length])
        with pytest.raises(SetError):
            Manifest.read(tmp_path)


def test_a_flipped_bit_anywhere_is_refused(tmp_path: Path) -> None:
    """A manifest file with any one bit flipped, also where it only tells where the set came from, is a `SetError`."""
    raw = _manifest().to_json().encode()
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << position % 8
        (tmp_path / MANIFEST_NAME).write_bytes(damaged)
        with pytest.raises(SetError):
            Manifest.read(tmp_path)


def test_a_manifest_written_anew_by_something_else_is_refused(tmp_path: Path) -> None:
    """The digest is of the text as it was written: the same JSON in another layout has another."""
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(_document(), indent=2))
    with pytest.raises(SetError, match=r"shardconv\.json: not as it was written, its own digest differs; "):
        Manifest.read(tmp_path)


def test_a_manifest_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    """A folder where the manifest should be is a `SetError` with the system's reason."""
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(SetError, match=r"shardconv\.json: cannot be read \(Is a directory\)$"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"repo":"org/name"', r'"repo":"\ud800"', "surrogates not allowed"),
        ('"repo":"org/name"', '"repo":"org/name","repo":"org/other"', "the name 'repo' stands twice"),
        ('"repo":"org/name"', '"repo":' + "[" * 70 + "]" * 70, "nested too deep"),
    ],
    ids=["surrogate", "name twice", "deep"],
)
def test_a_manifest_is_sound_also_where_no_digest_covers_it(old: str, new: str, why: str, tmp_path: Path) -> None:
    """What merely tells where a set came from is printed and copied on, so it must be text that can be."""
    text = _manifest().to_json()
    assert text.count(old) == 1
    (tmp_path / MANIFEST_NAME).write_text(text.replace(old, new))
    with pytest.raises(SetError, match=f"not JSON .*{why}"):
        Manifest.read(tmp_path)


def test_a_manifest_that_is_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    """A pipe would hold the reader for ever."""
    os.mkfifo(tmp_path / MANIFEST_NAME)
    with pytest.raises(SetError, match="a pipe or a device, not a file"):
        Manifest.read(tmp_path)


def test_a_manifest_beyond_reason_is_refused_unread(tmp_path: Path) -> None:
    """A file that would fill memory is refused by its length."""
    (tmp_path / MANIFEST_NAME).touch()
    os.truncate(tmp_path / MANIFEST_NAME, 1 << 40)
    with pytest.raises(SetError, match="1,099,511,627,776 bytes, at most 100,000,000 are read"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "same"),
    [({}, True), ({"digest": ""}, True), ({"digest": "1" * 32}, False), ({"name": "b"}, False), ({"nbytes": 8}, False),
     ({"header_digest": "2" * 32, "digest": ""}, False)],
)  # fmt: skip
def test_which_sources_are_of_the_same_weights(change: dict[str, Any], same: bool) -> None:
    """Names, lengths and headers always count; digests of all bytes where both sides know them; places never do."""
    record = SourceFileRecord("a", 7, "0" * 32, "3" * 32, {})
    one = Source("org/a", "c0ffee", None, None, (record,))
    other = Source(None, None, "transformer", "fp16", (replace(record, **change),))
    assert one.same_weights(other) is same
    assert other.same_weights(one) is same
    assert not one.same_weights(replace(one, files=(record, record)))
