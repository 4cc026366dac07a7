"""`shardconv.format.header`: what we write every reader opens, what is broken is refused by name and reason."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import xxhash
from handmade import entry, raw_file
from hypothesis import given, settings
from hypothesis import strategies as st

from shardconv.errors import CheckpointError
from shardconv.format.dtypes import DTYPE_BITS
from shardconv.format.header import MAX_HEADER_NBYTES, FileHeader, TensorEntry, encode_header

BYTE = entry("U8", [1], 0, 1)  # a tensor of one byte
HUGE = 2**63


def _read(data: bytes, folder: Path, name: str = "model.safetensors") -> FileHeader:
    path = folder / name
    path.write_bytes(data)
    return FileHeader.read(path)


def _laid_out(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> list[TensorEntry]:
    """Entries one after the other, from name -> (dtype, shape, nbytes)."""
    entries, start = [], 0
    for name, (dtype, shape, nbytes) in tensors.items():
        entries.append(TensorEntry(name, dtype, shape, start, nbytes))
        start += nbytes
    return entries


# Round trips

_names = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda name: name != "__metadata__")
_whole_bytes = sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0)


@st.composite
def _headers(draw: st.DrawFn) -> tuple[list[TensorEntry], dict[str, str]]:
    tensors = {}
    for name in draw(st.lists(_names, max_size=6, unique=True)):
        dtype = draw(st.sampled_from(_whole_bytes))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        num = 1
        for size in shape:
            num *= size
        tensors[name] = (dtype, shape, num * DTYPE_BITS[dtype] // 8)
    text = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
    return _laid_out(tensors), draw(st.dictionaries(text, text, max_size=3))


@settings(deadline=None, max_examples=70)
@given(_headers())
def test_reading_gives_back_what_was_encoded(header: tuple[list[TensorEntry], dict[str, str]]) -> None:
    """Whatever tensors and metadata are encoded, reading gives exactly them, in their order by position."""
    entries, metadata = header
    encoded = encode_header(entries, metadata)
    data = bytes(entries[-1].end if entries else 0)
    with tempfile.TemporaryDirectory() as folder:
        read = _read(encoded + data, Path(folder))
    assert read.tensors == tuple(sorted(entries, key=lambda e: (e.start, e.end)))
    assert read.metadata == metadata
    assert read.data_start == len(encoded)
    assert read.data_start % 4096 == 0
    assert read.file_nbytes == len(encoded) + len(data)
    assert read.digest == xxhash.xxh3_128_hexdigest(encoded)


def test_the_library_opens_what_we_write(tmp_path: Path) -> None:
    """A file with our header is an ordinary safetensors file: the library reads every tensor and the metadata."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    tensors = {
        "bf16": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
        "ü.weight": torch.tensor([1.5, -2.5]),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 8, dtype=torch.float16),
        "flags": torch.tensor([True, False, True]),
    }
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.float16: "F16", torch.bool: "BOOL"}
    described = {name: (names[t.dtype], tuple(t.shape), t.nbytes) for name, t in tensors.items()}
    data = b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values())
    path = tmp_path / "ours.safetensors"
    path.write_bytes(encode_header(_laid_out(described), {"format": "pt", "b": "2", "a": "1"}) + data)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "a": "1", "b": "2"}


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    """Names, dtypes, shapes and positions in a file that the safetensors library wrote are read as it meant them."""
    import torch
    from safetensors.torch import save_file

    tensors = {
        "w": torch.randn(4, 6),
        "half": torch.randn(3, 3).to(torch.bfloat16),
        "f8": torch.randn(5).to(torch.float8_e4m3fn),
        "z": torch.empty(0, 8),
        "s": torch.tensor(2.5),
        "c": torch.randn(2, dtype=torch.complex64),
    }
    path = tmp_path / "theirs.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "x": "y"})
    header = FileHeader.read(path)
    raw = path.read_bytes()
    assert header.metadata == {"format": "pt", "x": "y"}
    assert {e.name: e.shape for e in header.tensors} == {name: tuple(t.shape) for name, t in tensors.items()}
    assert {e.name: e.dtype for e in header.tensors} == {
        "w": "F32", "half": "BF16", "f8": "F8_E4M3", "z": "F32", "s": "F32", "c": "C64",
    }  # fmt: skip
    for each in header.tensors:
        stored = raw[header.data_start + each.start : header.data_start + each.end]
        assert stored == tensors[each.name].reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a11_encoding_is_reproducible() -> None:
    """The same tensors and metadata give the same bytes, in whatever order the metadata came (A11)."""
    entries = _laid_out({"a": ("U8", (3,), 3), "b": ("F32", (), 4)})
    assert encode_header(entries, {"x": "1", "a": "2"}) == encode_header(entries, {"a": "2", "x": "1"})


@pytest.mark.parametrize("num", [0, 1, 50, 51, 100, 1000])
def test_data_starts_on_a_page(num: int) -> None:
    """However long the JSON is, the header is padded with spaces to the next multiple of 4096 and no further."""
    encoded = encode_header(_laid_out({f"blocks.{i}.weight": ("U8", (1,), 1) for i in range(num)}), {"format": "pt"})
    text = encoded[8:].rstrip(b" ")
    assert len(encoded) % 4096 == 0
    assert len(encoded) - 8 - len(text) < 4096
    assert int.from_bytes(encoded[:8], "little") == len(encoded) - 8
    assert len(json.loads(text)) == num + 1


# Refused

_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f\nsize 12345\n"
_HTML = b"<!DOCTYPE html>\n<html><body>404: not here</body></html>"
_WELL = "not a well-formed safetensors file ("

MALFORMED: dict[str, tuple[bytes, str]] = {
    "lfs pointer": (_LFS, "a Git LFS pointer, not the weights; run: git lfs pull"),
    "html": (_HTML, "a web page, not the weights; the download went wrong, fetch it again"),
    "html after blanks": (b"\n  <html><head>", "a web page, not the weights; the download went wrong, fetch it again"),
    "empty": (b"", "the file is empty; fetch it again"),
    "pickle in a zip": (
        b"PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl",
        "a pickled PyTorch file under a .safetensors name; save it with safe_serialization=True",
    ),
    "plain pickle": (
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.",
        "a pickled PyTorch file under a .safetensors name; save it with safe_serialization=True",
    ),
    "7 bytes": (
        b"\x02\0\0\0\0\0\0",
        r"not a safetensors file (its first bytes are b'\x02\x00\x00\x00\x00\x00\x00'); fetch or write it again",
    ),
    "length beyond the cap": (
        raw_file("{}", b"x" * 64, MAX_HEADER_NBYTES + 1),
        "its header takes 100,000,001 bytes, readers of the format take at most 100,000,000; write its tensors into "
        "several files",
    ),
    "length beyond the file": (
        raw_file('{"w":', length=5000),
        "header declares 5,000 bytes for itself, the file has 13; the copy is incomplete, fetch it again",
    ),
    "random bytes": (b"\xde\xad\xbe\xef" * 8, r"not a safetensors file (its first bytes are b'\xde\xad\xbe\xef"),
    "data cut by one byte": (
        raw_file({"w": entry("F32", [2], 0, 8)}, b"x" * 7),
        "header declares 77 bytes, file has 76; the copy is incomplete, fetch it again",
    ),
    "data cut to nothing": (
        raw_file({"w": entry("F32", [2], 0, 8)}),
        "header declares 77 bytes, file has 69; the copy is incomplete, fetch it again",
    ),
    "trailing bytes": (
        raw_file({"w": entry("F32", [2], 0, 8)}, b"x" * 12),
        "header declares 77 bytes, file has 81; something was added to it, fetch it again",
    ),
    "bytes without tensors": (
        raw_file("{}", b"x"),
        "header declares 10 bytes, file has 11; something was added to it, fetch it again",
    ),
    "no header": (raw_file(b""), _WELL),
    "bad utf-8": (raw_file(b'{"\xff":1}'), _WELL + "'utf-8' codec can't decode byte 0xff in position 2"),
    "bad json": (raw_file('{"w":}'), _WELL + "Expecting value"),
    "json and more": (raw_file('{}{"w":1}'), _WELL + "Extra data"),
    "nul padding": (raw_file(b"{}\0\0"), _WELL + "Extra data"),
    "deep lists": (raw_file("[" * 100_000), _WELL + "nested too deep); fetch or write it again"),
    "deep maps": (raw_file('{"w":' * 100_000), _WELL + "nested too deep); fetch or write it again"),
    "a number of 5000 digits": (raw_file('{"w":%s}' % ("9" * 5000)), _WELL),
    "array": (raw_file([1, 2]), _WELL + "its header is not a JSON object); fetch or write it again"),
    "null": (raw_file("null"), _WELL + "its header is not a JSON object)"),
    "a name twice": (
        raw_file('{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":'
                 "[1,2]}}", b"xx"),
        _WELL + "the name 'w' stands twice)",
    ),
    "a field twice": (
        raw_file('{"w":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        _WELL + "the name 'dtype' stands twice)",
    ),
    "lone surrogate in a name": (
        raw_file(r'{"\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"), _WELL + "'utf-8' codec can't",
    ),
    "lone surrogate in metadata": (
        raw_file(r'{"__metadata__":{"a":"\udfff"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"), _WELL,
    ),
    "lone surrogate as metadata key": (
        raw_file(r'{"__metadata__":{"\udfff":"a"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"), _WELL,
    ),
    "metadata holds a number": (
        raw_file({"__metadata__": {"a": 1}, "w": BYTE}, b"x"), _WELL + "__metadata__ is not a map of strings)",
    ),
    "metadata is a list": (
        raw_file({"__metadata__": [], "w": BYTE}, b"x"), _WELL + "__metadata__ is not a map of strings)",
    ),
    "metadata nested": (
        raw_file({"__metadata__": {"a": {}}, "w": BYTE}, b"x"), _WELL + "__metadata__ is not a map of strings)",
    ),
    "entry is a list": (
        raw_file({"w": [1]}), _WELL + "the entry of 'w' does not have exactly dtype, shape and data_offsets)",
    ),
    "entry lacks the shape": (
        raw_file({"w": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x"),
        _WELL + "the entry of 'w' does not have exactly dtype, shape and data_offsets)",
    ),
    "entry with a strange field": (
        raw_file({"w": {**BYTE, "stride": [1]}}, b"x"),
        _WELL + "the entry of 'w' does not have exactly dtype, shape and data_offsets)",
    ),
    "unknown dtype": (raw_file({"w": entry("F7", [1], 0, 1)}, b"x"), _WELL + "'w' has the unknown dtype 'F7')"),
    "dtype is a list": (raw_file({"w": {**BYTE, "dtype": []}}, b"x"), _WELL + "'w' has the unknown dtype [])"),
    "negative size": (raw_file({"w": entry("U8", [-1, -1], 0, 1)}, b"x"), _WELL + "'w' has the shape [-1, -1])"),
    "float size": (raw_file({"w": entry("U8", [1.0], 0, 1)}, b"x"), _WELL + "'w' has the shape [1.0])"),
    "bool size": (raw_file({"w": entry("U8", [True], 0, 1)}, b"x"), _WELL + "'w' has the shape [True])"),
    "huge size": (raw_file({"w": entry("U8", [HUGE], 0, 1)}, b"x"), _WELL + f"'w' has the shape [{HUGE}])"),
    "shape is a number": (raw_file({"w": {**BYTE, "shape": 1}}, b"x"), _WELL + "'w' has the shape 1)"),
    "shape of astronomic product": (raw_file({"w": entry("U8", [2**62] * 400, 0, 1)}, b"x"), _WELL + "'w'"),
    "empty shape of astronomic product": (raw_file({"w": entry("U8", [2**62, 2**62, 0], 0, 0)}), _WELL + "'w'"),
    "half a byte": (raw_file({"w": entry("F4", [3], 0, 2)}, b"xx"), _WELL + "'w'"),
    "negative offset": (raw_file({"w": entry("U8", [1], -1, 0)}, b"x"), _WELL + "'w' has the data_offsets [-1, 0])"),
    "bool offsets": (
        raw_file({"w": entry("U8", [1], False, True)}, b"x"), _WELL + "'w' has the data_offsets [False, True])",
    ),
    "float offset": (raw_file({"w": entry("U8", [1], 0, 1.0)}, b"x"), _WELL + "'w' has the data_offsets [0, 1.0])"),
    "infinite offset": (
        raw_file('{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1e999]}}', b"x"),
        _WELL + "'w' has the data_offsets [0, inf])",
    ),
    "offset of 2**63": (
        raw_file({"w": entry("U8", [1], HUGE - 1, HUGE)}, b"x"),
        _WELL + f"'w' has the data_offsets [{HUGE - 1}, {HUGE}])",
    ),
    "offsets just below 2**63": (
        raw_file({"w": entry("U8", [1], HUGE - 2, HUGE - 1)}, b"x"),
        _WELL + f"'w' leaves a gap before it: starts at byte {HUGE - 2:,}, expected 0)",
    ),
    "three offsets": (
        raw_file({"w": {**BYTE, "data_offsets": [0, 1, 2]}}, b"x"), _WELL + "'w' has the data_offsets [0, 1, 2])",
    ),
    "shape larger than its bytes": (
        raw_file({"w": entry("F32", [1000], 0, 4)}, b"xxxx"),
        _WELL + "'w', F32 [1000], takes 4,000 bytes, its data_offsets span 4)",
    ),
    "offsets the wrong way round": (
        raw_file({"w": entry("U8", [1], 1, 0)}, b"x"), _WELL + "'w', U8 [1], takes 1 bytes, its data_offsets span -1)",
    ),
    "same bytes twice": (
        raw_file({"w": BYTE, "v": BYTE}, b"x"),
        _WELL + "'v' overlaps the tensor before it: starts at byte 0, expected 1)",
    ),
    "overlap": (
        raw_file({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, b"x" * 6),
        _WELL + "'b' overlaps the tensor before it: starts at byte 2, expected 4)",
    ),
    "gap": (
        raw_file({"a": BYTE, "b": entry("U8", [1], 2, 3)}, b"xxx"),
        _WELL + "'b' leaves a gap before it: starts at byte 2, expected 1)",
    ),
    "gap at the start": (
        raw_file({"a": entry("U8", [1], 1, 2)}, b"xx"),
        _WELL + "'a' leaves a gap before it: starts at byte 1, expected 0)",
    ),
    "empty tensor inside another": (
        raw_file({"a": entry("U8", [2], 0, 2), "z": entry("U8", [0], 1, 1)}, b"xx"),
        _WELL + "'z' overlaps the tensor before it: starts at byte 1, expected 2)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MALFORMED)
def test_a7_a12_a13_e1_a_broken_file_is_refused_by_name_and_reason(kind: str, tmp_path: Path) -> None:
    """Each kind of broken file gives one fault that names it, says what it is and what to do (A7, A12, A13, E1)."""
    data, expected = MALFORMED[kind]
    with pytest.raises(CheckpointError) as caught:
        _read(data, tmp_path)
    (issue,) = caught.value.issues
    assert issue.startswith(f"model.safetensors: {expected}")
    assert issue.rstrip(")").endswith(("again", "git lfs pull", "safe_serialization=True", "into several files"))


@pytest.mark.parametrize("missing", [1, 4096, 8192])
def test_e1_a_shortened_file_of_ours_says_how_much_is_missing(missing: int, tmp_path: Path) -> None:
    """A file cut by a byte, by a page or down to its header is refused with both lengths (E1)."""
    whole = encode_header([TensorEntry("w", "U8", (8192,), 0, 8192)], {}) + bytes(8192)
    with pytest.raises(CheckpointError, match=f"declares 12,288 bytes, file has {12288 - missing:,}"):
        _read(whole[: len(whole) - missing], tmp_path)


def test_a_shape_of_many_huge_sizes_is_refused_at_once(tmp_path: Path) -> None:
    """A hostile shape costs no time: 30,000 sizes of 2**62 are refused without multiplying all of them."""
    data = raw_file({"w": entry("U8", [2**62 + 1] * 30_000, 0, 1)}, b"x")
    start = time.process_time()
    with pytest.raises(CheckpointError):
        _read(data, tmp_path)
    assert time.process_time() - start < 2  # seconds; all of them take more, and time grows with their square


# Accepted

ACCEPTED: dict[str, tuple[bytes, list[tuple[str, str, tuple[int, ...], int, int]]]] = {
    "no metadata": (raw_file({"w": BYTE}, b"x"), [("w", "U8", (1,), 0, 1)]),
    "null metadata": (raw_file({"__metadata__": None, "w": BYTE}, b"x"), [("w", "U8", (1,), 0, 1)]),
    "empty metadata": (raw_file({"__metadata__": {}, "w": BYTE}, b"x"), [("w", "U8", (1,), 0, 1)]),
    "no tensors": (raw_file("{}"), []),
    "no tensors, null metadata": (raw_file({"__metadata__": None}), []),
    "padding": (raw_file('{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}  \n', b"x"), [("w", "U8", (1,), 0, 1)]),
    "odd header length": (
        raw_file('{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4] }}', b"xxxx"),
        [("w", "F32", (1,), 0, 4)],
    ),
    "misaligned tensor": (
        raw_file({"u": entry("U8", [3], 0, 3), "w": entry("BF16", [8], 3, 19)}, b"x" * 19),
        [("u", "U8", (3,), 0, 3), ("w", "BF16", (8,), 3, 19)],
    ),
    "scalars": (
        raw_file({"s": entry("F32", [], 0, 4), "t": entry("BF16", [], 4, 6)}, b"x" * 6),
        [("s", "F32", (), 0, 4), ("t", "BF16", (), 4, 6)],
    ),
    "only empty tensors": (
        raw_file({"a": entry("F32", [0, 8], 0, 0), "b": entry("F32", [0], 0, 0)}),
        [("a", "F32", (0, 8), 0, 0), ("b", "F32", (0,), 0, 0)],
    ),
    "empty tensors between others": (
        raw_file({"z2": entry("U8", [0], 1, 1), "b": entry("U8", [1], 1, 2), "a": BYTE, "z": entry("I8", [0], 0, 0)},
                 b"xx"),
        [("z", "I8", (0,), 0, 0), ("a", "U8", (1,), 0, 1), ("z2", "U8", (0,), 1, 1), ("b", "U8", (1,), 1, 2)],
    ),
    "out of order": (
        raw_file({"b": entry("U8", [1], 1, 2), "a": BYTE}, b"xx"),
        [("a", "U8", (1,), 0, 1), ("b", "U8", (1,), 1, 2)],
    ),
}  # fmt: skip
for _dtype, _nr, _nbytes in [("F8_E4M3", 3, 3), ("F8_E5M2", 3, 3), ("F8_E8M0", 3, 3), ("F8_E4M3FNUZ", 3, 3),
                             ("F8_E5M2FNUZ", 3, 3), ("F4", 6, 3), ("F6_E2M3", 4, 3), ("F6_E3M2", 4, 3),
                             ("C64", 2, 16), ("BOOL", 3, 3), ("U16", 3, 6), ("I64", 2, 16)]:  # fmt: skip
    ACCEPTED[_dtype] = (
        raw_file({"w": entry(_dtype, [_nr], 0, _nbytes)}, b"\1" * _nbytes),
        [("w", _dtype, (_nr,), 0, _nbytes)],
    )


@pytest.mark.parametrize("kind", ACCEPTED)
def test_a1_a5_a9_d4_an_unusual_but_whole_file_is_read(kind: str, tmp_path: Path) -> None:
    """Unusual files that the format allows are read as they are, and the library agrees (A1, A5, A9, D4)."""
    from safetensors import safe_open

    data, expected = ACCEPTED[kind]
    header = _read(data, tmp_path)
    assert [(t.name, t.dtype, t.shape, t.start, t.end) for t in header.tensors] == expected
    assert header.metadata == {}
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(name for name, *_ in expected)


def test_the_odd_header_of_the_table_is_odd() -> None:
    """The row of the table above that is to have a misaligned data part does have one."""
    data, _ = ACCEPTED["odd header length"]
    assert int.from_bytes(data[:8], "little") % 2 == 1


# Anything at all

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
_nearly_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "f32", ""]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**62, 2**64, -1, True, 1.0]), max_size=3),
        "data_offsets": st.lists(st.sampled_from([0, 1, 2, 4, 8, 2**63 - 1, 2**63, -1, None]), min_size=1, max_size=3),
    }
)
_VALID = raw_file(
    {"__metadata__": {"format": "pt"}, "a": entry("F32", [2, 3], 0, 24), "b": entry("U8", [5], 24, 29),
     "c": entry("BF16", [], 29, 31), "z": entry("F16", [0, 4], 31, 31)}, bytes(range(31))
)  # fmt: skip


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(_VALID)
    rng = random.Random(draw(st.integers(0, 2**32)))
    for _ in range(draw(st.integers(1, 4))):
        position = rng.randrange(len(data) or 1)
        match rng.randrange(4):
            case 0:
                data[position : position + 1] = bytes([rng.randrange(256)])
            case 1:
                data.insert(position, rng.choice(b'0123456789-,:{}[]" .e\\\xff'))
            case 2:
                del data[position : position + rng.randrange(1, 4)]
            case _:
                del data[position:]
    if rng.random() < 0.7 and len(data) > 8:  # keep the length plausible, so that the JSON is reached
        data[:8] = max(0, len(data) - 8 - 31).to_bytes(8, "little")
    return bytes(data)


_anything = (
    st.binary(max_size=40)
    | _mutated()
    | st.builds(raw_file, _json.map(json.dumps), st.binary(max_size=9))
    | st.builds(raw_file, st.dictionaries(st.text(max_size=3), _nearly_entries, max_size=3), st.binary(max_size=9))
)


def _read_or_refuse(data: bytes, path: Path) -> FileHeader | CheckpointError:
    try:
        return _read(data, path.parent, path.name)
    except CheckpointError as error:
        return error


@settings(deadline=None, max_examples=150)
@given(_anything)
def test_no_bytes_escape_the_check(data: bytes) -> None:
    """Whatever bytes a file holds, it is read as the library would read it, or refused with a fault that names it."""
    from safetensors import safe_open

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.safetensors")
        header = _read_or_refuse(data, path)
        if isinstance(header, CheckpointError):
            assert [issue[:15] for issue in header.issues] == ["m.safetensors: "]
            return
        assert header.data_start + sum(each.nbytes for each in header.tensors) == len(data)
        if b"-0" not in data:  # we take -0 for 0, the library does not
            with safe_open(path, "np") as file:
                assert set(file.keys()) == {each.name for each in header.tensors}


def test_a_missing_file_is_a_system_error(tmp_path: Path) -> None:
    """A path without a file is the system's own error, not called a damaged checkpoint."""
    with pytest.raises(FileNotFoundError):
        FileHeader.read(tmp_path / "absent.safetensors")


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    """A pipe would hold the reader for ever."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"^model.safetensors: a pipe or a device, not a file; fetch it again$"):
        FileHeader.read(tmp_path / "model.safetensors")


def test_a_fault_repeats_no_megabytes(tmp_path: Path) -> None:
    """A header whose fault is a long list is told in a line of ordinary length, its end intact."""
    with pytest.raises(CheckpointError) as caught:
        _read(raw_file({"w": entry("U8", [-1] * 100_000, 0, 1)}, b"x"), tmp_path)
    assert len(str(caught.value)) <= 1500
    assert str(caught.value).startswith("model.safetensors: not a well-formed safetensors file ('w' has the shape [-1")
    assert str(caught.value).endswith("); fetch or write it again")
