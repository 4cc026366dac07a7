"""`shardconv.format.layout`: where every slice stands, by the rules of the format, and two files kept byte for byte."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from handmade import write_source
from hypothesis import given, settings
from hypothesis import strategies as st

from shardconv.commands.prepare import plan_conversion
from shardconv.engine import run as engine
from shardconv.errors import CheckpointError
from shardconv.format.cut import Cut
from shardconv.format.dtypes import DTYPE_BITS
from shardconv.format.header import FileHeader, TensorEntry
from shardconv.format.layout import FileLayout, SetLayout, StoredTensor, file_header, plan_layout, stored_tensors
from shardconv.format.manifest import FileRecord, Manifest, Source, SourceFileRecord
from shardconv.format.names import rank_file_name
from shardconv.format.plan import REPLICATED, Rule, Style
from shardconv.source.checkpoint import SourceFile, SourceTensor

WHOLE_BYTES = sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0)


@st.composite
def _sets(draw: st.DrawFn) -> SetLayout:
    """Layouts of up to 8 tensors of every dtype, cut and whole, some with slices of 256 bytes and its multiples."""
    tp = draw(st.integers(1, 8))
    tensors = []
    for i in range(draw(st.integers(0, 8))):
        dtype = draw(st.sampled_from(WHOLE_BYTES))
        shape = draw(st.lists(st.sampled_from([0, 1, 3, 8, 32, 128]), max_size=2))
        cut = None
        if shape and draw(st.booleans()):
            cut = Cut(0, tuple(tp * part for part in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))))
            shape[0] = sum(cut.block_sizes)
        tensors.append(StoredTensor(f"t{i}", dtype, tuple(shape), "colwise" if cut else REPLICATED, cut))
    return plan_layout(tensors, tp, draw(st.booleans()))


def _source_order(layout: SetLayout) -> list[StoredTensor]:
    return sorted(layout.tensors, key=lambda tensor: int(tensor.name[1:]))


def _slice_nbytes(tensor: StoredTensor, tp: int) -> int:
    return math.prod(tensor.shape) * DTYPE_BITS[tensor.dtype] // 8 // (tp if tensor.cut else 1)


@settings(deadline=None)
@given(_sets())
def test_the_order_within_a_file(layout: SetLayout) -> None:
    """First the slices that are multiples of 256 bytes, then by item size descending, each in source order."""
    for file in layout.files:
        held = {entry.name for entry in file.tensors}
        source = [tensor for tensor in _source_order(layout) if tensor.name in held]
        first = [t.name for t in source if _slice_nbytes(t, layout.tp) % 256 == 0]
        then = [t.name for bits in (64, 32, 16, 8) for t in source
                if t.name not in first and DTYPE_BITS[t.dtype] == bits]  # fmt: skip
        assert [entry.name for entry in file.tensors] == first + then


@settings(deadline=None)
@given(_sets())
def test_every_tensor_stands_where_it_should(layout: SetLayout) -> None:
    """A cut tensor is once in each rank's file, a whole one once in the shared file, or in each with self_contained."""
    ranks = {name: [file.rank for file in layout.files for entry in file.tensors if entry.name == name]
             for name in layout.starts}  # fmt: skip
    everyone = list(range(layout.tp))
    for tensor in layout.tensors:
        assert ranks[tensor.name] == (everyone if tensor.cut or layout.self_contained else [None])
    names = [rank_file_name(rank, layout.tp) for rank in everyone]
    shared = not layout.self_contained and any(tensor.cut is None for tensor in layout.tensors)
    assert [file.name for file in layout.files] == names + ["replicated.safetensors"] * shared


@settings(deadline=None)
@given(_sets())
def test_ranks_differ_in_nothing_but_their_bytes(layout: SetLayout) -> None:
    """Every rank's file has the same tensors, shapes and offsets, so that all of them only ever grow at the end."""
    assert len({file.tensors for file in layout.files if file.rank is not None}) == 1
    for index, file in enumerate(layout.files):
        placed = [dict(layout.starts[tensor.name]).get(index) for tensor in layout.tensors]
        offsets = [offset for offset in placed if offset is not None]
        assert offsets == sorted(offsets)
        assert len(offsets) == len(file.tensors)


@settings(deadline=None)
@given(_sets())
def test_slices_are_contiguous_and_aligned(layout: SetLayout) -> None:
    """Without a hole each slice follows the last, starts on its item size, and on 256 bytes where its size allows."""
    for index, file in enumerate(layout.files):
        position = 0
        aligned = True
        for entry in file.tensors:
            tensor = next(tensor for tensor in layout.tensors if tensor.name == entry.name)
            assert (entry.start, entry.nbytes) == (position, _slice_nbytes(tensor, layout.tp))
            position += entry.nbytes
            start = dict(layout.starts[entry.name])[index]
            assert start == file.header_nbytes + entry.start
            assert start % (DTYPE_BITS[entry.dtype] // 8) == 0
            aligned = aligned and entry.nbytes % 256 == 0
            assert start % 256 == 0 or not aligned
        assert file.header_nbytes % 4096 == 0
        assert file.nbytes == file.header_nbytes + position
    assert layout.nbytes == sum(file.nbytes for file in layout.files)


@settings(deadline=None)
@given(_sets(), st.text("0123456789abcdef", min_size=32, max_size=32))
def test_the_header_has_one_length_whatever_the_id(layout: SetLayout, conversion_id: str) -> None:
    """The room kept for a header is what it takes, though its conversion id is known only at the end."""
    for file in layout.files:
        header = file_header(file, conversion_id, layout.tp)
        assert len(header) == file.header_nbytes
        about = json.loads(json.loads(header[8:])["__metadata__"]["shardconv"])
        assert about == {"conversion_id": conversion_id, "format_version": 1, "rank": file.rank, "tp_degree": layout.tp}


def test_the_room_for_a_header_is_exact_at_its_edge() -> None:
    """Where one letter more takes another 4096 bytes, the room kept is still what the header with its id takes."""
    rooms = []
    for length in range(3700, 4000):
        file = plan_layout([StoredTensor("x" * length, "U8", (1,), REPLICATED, None)], 1, True).files[0]
        assert len(file_header(file, "f" * 32, 1)) == file.header_nbytes
        rooms.append(file.header_nbytes)
    assert set(rooms) == {4096, 8192}  # so the edge was among them


def test_a_degree_of_one_stores_the_model_whole() -> None:
    """A cut for one rank is the whole tensor."""
    layout = plan_layout([StoredTensor("w", "F32", (6, 2), "colwise", Cut(0, (2, 4)))], 1, False)
    assert layout.files == (FileLayout("rank-00000-of-00001.safetensors", 0,
                                       (TensorEntry("w", "F32", (6, 2), 0, 48),), 4096),)  # fmt: skip


# File names


@pytest.mark.slow
def test_b10_saving_over_a_set_leaves_it_alone(tmp_path: Path) -> None:
    """diffusers' `save_pretrained` cleans up its own old shards and no file of a set in the same folder (B10)."""
    from diffusers import ConfigMixin, ModelMixin
    from torch import nn

    class Tiny(ModelMixin, ConfigMixin):
        config_name = "config.json"

        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)

    ours = [rank_file_name(0, 1), rank_file_name(11, 100), "replicated.safetensors", "shardconv.json"]
    stale = "diffusion_pytorch_model-00001-of-00002.safetensors"
    for name in [*ours, stale]:
        (tmp_path / name).write_bytes(b"kept")
    Tiny().save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {*ours, "config.json", "diffusion_pytorch_model.safetensors"}  # so its clean-up did run
    assert all((tmp_path / name).read_bytes() == b"kept" for name in ours)


def test_b11_names_sort_by_rank() -> None:
    """In a listing, files come in the order of ranks at every degree (B11)."""
    for tp in (1, 12, 100, 65536):
        names = [rank_file_name(rank, tp) for rank in range(tp)]
        assert sorted(names) == names


# What is stored


def _source(name: str, dtype: str, shape: tuple[int, ...] = (4,)) -> TensorEntry:
    return TensorEntry(name, dtype, shape, 0, math.prod(shape) * DTYPE_BITS[dtype] // 8)


def test_d1_d4_d7_a_cast_touches_real_floating_point_only() -> None:
    """bf16 goes to real floats, 8-bit ones too; integers, bools, complex, scales and packed ones stay; named islands
    go to float32 (D1, D4, D7)."""
    dtypes = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "BOOL", "U8", "C64", "F8_E8M0", "F4"]
    sources = [_source(f"x.{dtype}", dtype) for dtype in dtypes]
    cast = stored_tensors([*sources, _source("time_embedder.w", "F16")], {}, "BF16", ["time_embedder.w", "x.I64"])
    assert [tensor.dtype for tensor in cast] == ["BF16"] * 6 + ["I64", "BOOL", "U8", "C64", "F8_E8M0", "F4", "F32"]
    plain = stored_tensors(sources, {}, None, [])
    assert [tensor.dtype for tensor in plain] == dtypes


def test_styles_and_cuts_are_recorded() -> None:
    """A planned tensor keeps its style even when it stays whole; all others are replicated; source order stays."""
    cut = Cut(0, (4,))
    cuts = {"a": (Style.COLWISE, cut), "c": (Style.ROWWISE, None)}
    tensors = stored_tensors([_source("c", "F32"), _source("b", "F32"), _source("a", "F32")], cuts, None, [])
    assert [(t.name, t.style, t.cut) for t in tensors] == [("c", "rowwise", None), ("b", REPLICATED, None),
                                                           ("a", "colwise", cut)]  # fmt: skip


def test_all_elements_of_less_than_a_byte_are_named() -> None:
    """Planned tensors of 4- or 6-bit elements, which no byte can be cut from, are refused, every one by name."""
    cuts = {name: (Style.COLWISE, Cut(0, (4,))) for name in ("a", "b", "c")}
    sources = [_source("a", "F4"), _source("b", "F32"), _source("c", "F6_E3M2"), _source("d", "F4")]
    with pytest.raises(CheckpointError) as caught:
        stored_tensors(sources, cuts, None, [])
    assert [issue[:17] for issue in caught.value.issues] == ["a: stored as F4, ", "c: stored as F6_E"]


# Golden bytes

_TENSORS: Sequence[tuple[str, str, Sequence[int], bytes]] = (
    ("proj.weight", "BF16", (4, 2), bytes(range(16))),
    ("proj.bias", "BF16", (4,), bytes(range(32, 40))),
    ("out.weight", "BF16", (2, 4), bytes(range(64, 80))),
    ("out.bias", "BF16", (2,), bytes(range(96, 100))),
    ("scale", "F32", (), bytes.fromhex("0000803f")),
    ("table", "U8", (256,), bytes(range(256))),
)
_CUTS: dict[str, tuple[Style, Cut | None]] = {
    "proj.weight": (Style.PACKED_COLWISE, Cut(0, (2, 2))),
    "proj.bias": (Style.PACKED_COLWISE, Cut(0, (2, 2))),
    "out.weight": (Style.ROWWISE, Cut(1, (4,))),
    "out.bias": (Style.ROWWISE, None),
}

_RANK_1_HEADER = (
    '{"__metadata__":{"format":"pt","shardconv":"{\\"conversion_id\\":\\"CONVERSION_ID\\",'
    '\\"format_version\\":1,\\"rank\\":1,\\"tp_degree\\":2}"},'
    '"proj.weight":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},'
    '"proj.bias":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]},'
    '"out.weight":{"dtype":"BF16","shape":[2,2],"data_offsets":[12,20]}}'
)
_RANK_1_DATA = "040506070c0d0e0f22232627444546474c4d4e4f"
_REPLICATED_DATA = bytes(range(256)).hex() + "0000803f60616263"
_MANIFEST = """\
{
"format_version": 1,
"tool": {"name":"shardconv","version":"0.1.0"},
"conversion_id": "66b408f00f68342cb8613e5302fb710c",
"model_class": "TinyTransformer2DModel",
"config_digest": "00000000000000000000000000000000",
"tp_degree": 2,
"self_contained": false,
"dtype": {"cast_to":null,"keep_fp32":[]},
"plan": {"proj":{"style":"packed_colwise","blocks":[1,1]},"out":"rowwise"},
"head_counts": [4],
"library": {"name":"diffusers","version":"0.42.1"},
"source": {"repo":"org/tiny","revision":"c0ffee","subfolder":"transformer","variant":null,\
"files":[{"name":"diffusion_pytorch_model.safetensors","nbytes":742,\
"header_digest":"5246a3180c2536bd5b0ebe315dedf1a7","digest":"55555555555555555555555555555555","metadata":{}}]},
"aliases": {"tied":"table"},
"left_out": ["unused"],
"files": [
{"name":"rank-00000-of-00002.safetensors","rank":0,"nbytes":4116,\
"header_digest":"cc2c460047728f552bffee68842d297d"},
{"name":"rank-00001-of-00002.safetensors","rank":1,"nbytes":4116,\
"header_digest":"ea5b998326eaa42398abd4935ba8f879"},
{"name":"replicated.safetensors","rank":null,"nbytes":4360,"header_digest":"c4642f6c4129261c48f354a9d21b3a4e"}
],
"tensors": [
{"name":"proj.weight","dtype":"BF16","shape":[4,2],"style":"packed_colwise","dim":0,"block_sizes":[2,2],\
"digests":["67e45d345b5bd2ad07dcc4a4feff9c9c","0a613bc7d356942cc22d81f84fed6945"]},
{"name":"proj.bias","dtype":"BF16","shape":[4],"style":"packed_colwise","dim":0,"block_sizes":[2,2],\
"digests":["eae74b8e0295dce63eb40da27bf3827e","c57ca97d8065b7bc08dc8d9b94b998ff"]},
{"name":"out.weight","dtype":"BF16","shape":[2,4],"style":"rowwise","dim":1,"block_sizes":[4],\
"digests":["1ac9fa0a71a174b157a9af6897085b56","553fdf7f0e940c72d9f44c3d2eb77535"]},
{"name":"out.bias","dtype":"BF16","shape":[2],"style":"rowwise","digests":["ca3c0b54b018ddb3630593425700e428"]},
{"name":"scale","dtype":"F32","shape":[],"style":"replicated","digests":["e6f9acca6893caeb591ef4e963e120d4"]},
{"name":"table","dtype":"U8","shape":[256],"style":"replicated","digests":["f1f8a93f50849ac39408a4433b952d71"]}
],
"manifest_digest": "b455ea6846cac487f6e33e334bf6706a"
}
"""


def _convert_by_hand(folder: Path) -> Manifest:
    """What a conversion does, on six tensors written byte by byte: files of two ranks, then their manifest."""
    path = folder / "diffusion_pytorch_model.safetensors"
    write_source(path, _TENSORS)
    file = SourceFile(path.name, path, FileHeader.read(path))
    sources = {entry.name: SourceTensor(entry, file) for entry in file.header.tensors}
    tensors = stored_tensors(file.header.tensors, _CUTS, None, ())
    layout = plan_layout(tensors, 2, False)
    fds = [os.open(folder / each.name, os.O_RDWR | os.O_CREAT, 0o600) for each in layout.files]
    digests = engine.run(plan_conversion(layout, sources), fds, lambda nbytes: None)
    manifest = Manifest(
        tool_version="0.1.0", conversion_id="", model_class="TinyTransformer2DModel", config_digest="0" * 32,
        library_name="diffusers",
        library_version="0.42.1",
        source=Source("org/tiny", "c0ffee", "transformer", None,
                      (SourceFileRecord(path.name, file.header.file_nbytes, file.header.digest, "5" * 32, {}),)),
        tp_degree=2, self_contained=False, cast_to=None, keep_fp32=(),
        plan={"proj": Rule(Style.PACKED_COLWISE, (1, 1)), "out": Rule(Style.ROWWISE)}, head_counts=(4,),
        tensors=tuple(tensors),
        digests={name: each.slices for name, each in digests.items()}, aliases={"tied": "table"},
        left_out=("unused",), files=(),
    )  # fmt: skip
    manifest = replace(manifest, conversion_id=manifest.identity())
    records = []
    for fd, each in zip(fds, layout.files, strict=True):
        header = file_header(each, manifest.conversion_id, 2)
        os.pwrite(fd, header, 0)
        os.close(fd)
        records.append(FileRecord(each.name, each.rank, each.nbytes, xxhash.xxh3_128_hexdigest(header)))
    return replace(manifest, files=tuple(records))


def test_golden_rank_file(tmp_path: Path) -> None:
    """The file of rank 1 of a tiny set is, byte for byte, what this format version has always written."""
    manifest = _convert_by_hand(tmp_path)
    text = _RANK_1_HEADER.replace("CONVERSION_ID", manifest.conversion_id).encode()
    expected = (4088).to_bytes(8, "little") + text.ljust(4088, b" ") + bytes.fromhex(_RANK_1_DATA)
    assert (tmp_path / "rank-00001-of-00002.safetensors").read_bytes() == expected
    shared = (tmp_path / "replicated.safetensors").read_bytes()
    assert len(shared) == 4096 + 264
    assert shared[4096:] == bytes.fromhex(_REPLICATED_DATA)


def test_golden_manifest(tmp_path: Path) -> None:
    """The manifest of a tiny set is, byte for byte, what this format version has always written, id and digests too."""
    assert _convert_by_hand(tmp_path).to_json() == _MANIFEST


def test_the_golden_set_is_read_by_the_library(tmp_path: Path) -> None:
    """What is frozen above is right: the library reads from it the slices that the source's bytes spell."""
    from safetensors import safe_open

    _convert_by_hand(tmp_path)
    with safe_open(tmp_path / "rank-00001-of-00002.safetensors", "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
    with safe_open(tmp_path / "diffusion_pytorch_model.safetensors", "pt") as file:
        source = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
    import torch

    assert torch.equal(held["proj.weight"], source["proj.weight"][[1, 3]])
    assert torch.equal(held["proj.bias"], source["proj.bias"][[1, 3]])
    assert torch.equal(held["out.weight"], source["out.weight"][:, 2:])
