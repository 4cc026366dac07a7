"""Rows of the fault list that several parts answer together: what convert, merge and loading make of one odd input."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import toys
from handmade import entry, raw_file

import loader
import shardconv
from shardconv import CheckpointError, SetError, convert
from shardconv.commands.merge import merge
from shardconv.format.header import FileHeader
from shardconv.format.manifest import Manifest
from shardconv.format.sets import open_files

RANK_0 = "rank-00000-of-00001.safetensors"
WEIGHT = "blocks.1.attn.to_out.0.weight"  # cut on dim 1, in the last block


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """T with float32 weights: each value tells where it belongs."""
    toys.install(monkeypatch)
    return toys.save(toys.build(toys.ToyTransformer, dtype=torch.float32), tmp_path / "T", max_shard_size="3MB")


@pytest.fixture
def alone(source: Path, tmp_path: Path) -> Path:
    """A set of one rank, to damage: the `tp1` folder."""
    convert(source, tmp_path / "out", tp=1, self_contained=True)
    return tmp_path / "out" / "tp1"


def whole(source: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the source, by the library."""
    paths = sorted(source.glob("*.safetensors"))
    return {key: tensor for path in paths for key, tensor in safetensors.torch.load_file(path).items()}


def everyone(folder: Path) -> dict[str, str]:
    """What each user of a set says to it, by verb: all must refuse."""
    users: dict[str, Callable[[], object]] = {
        "load": lambda: loader.load_model(folder, device="cpu"),
        "merge": lambda: merge(folder, folder.parent.parent / "merged"),
        "convert": lambda: convert(folder.parent.parent / "T", folder.parent, tp=1, self_contained=True),
    }
    said = {}
    for name, use in users.items():
        with pytest.raises((SetError, shardconv.OutputError)) as caught:
            use()
        (said[name],) = caught.value.issues
    return said


@pytest.mark.parametrize("extra", [b"\0", b"more", bytes(4096)])
def test_a13_everyone_refuses_trailing_bytes_in_the_same_words(alone: Path, extra: bytes) -> None:
    """A rank file with bytes after its last tensor is refused alike by loading, merging and a rerun of convert."""
    path = alone / RANK_0
    nbytes = path.stat().st_size
    with open(path, "ab") as file:
        file.write(extra)
    fault = (
        f"{RANK_0}: header declares {nbytes:,} bytes, file has {nbytes + len(extra):,}; something was added to it, "
        "fetch it again"
    )
    assert everyone(alone) == {"load": fault, "merge": fault, "convert": f"{fault}; or add --overwrite"}


@pytest.mark.parametrize("left", ["1 byte short", "4 KiB short", "only the header"])
def test_e1_everyone_refuses_a_rank_file_cut_short(alone: Path, left: str) -> None:
    """The length is compared with the header before anything is mapped: file and both lengths are named."""
    path = alone / RANK_0
    nbytes, start = path.stat().st_size, FileHeader.read(path).data_start
    os.truncate(path, {"1 byte short": nbytes - 1, "4 KiB short": nbytes - 4096, "only the header": start}[left])
    fault = (
        f"{RANK_0}: header declares {nbytes:,} bytes, file has {path.stat().st_size:,}; the copy is incomplete, "
        "fetch it again"
    )
    assert everyone(alone) == {"load": fault, "merge": fault, "convert": f"{fault}; or add --overwrite"}


_CRAFTED = {
    "one range twice": ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, "'b' overlaps the tensor before"),
    "shape larger than bytes": ({"a": entry("F32", [1000], 0, 4)}, "takes 4,000 bytes, its data_offsets span 4"),
    "end beyond the file": ({"a": entry("F32", [1000], 0, 4000)}, "the copy is incomplete"),
    "another model": ({"a": entry("F32", [1], 0, 4)}, "its header is not the one the manifest describes"),
}


@pytest.mark.parametrize("kind", _CRAFTED)
def test_a12_everyone_refuses_a_crafted_header(alone: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aliased ranges, shapes larger than their bytes, offsets past the end, other tensors: nothing is mapped."""
    tensors, fault = _CRAFTED[kind]
    about = json.dumps({"conversion_id": Manifest.read(alone).conversion_id, "format_version": 1, "rank": 0,
                        "tp_degree": 1})  # fmt: skip
    (alone / RANK_0).write_bytes(raw_file({"__metadata__": {"shardconv": about}, **tensors}, b"xxxx"))
    monkeypatch.setattr("loader.load.map_file", lambda path, header: pytest.fail("mapped"))
    assert all(said.startswith(f"{RANK_0}: ") and fault in said for said in everyone(alone).values())


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}], ids=["none", "empty", "format only"])
def test_a9_a_rank_file_must_say_what_it_is(alone: Path, metadata: dict[str, str] | None) -> None:
    """Sources may lack metadata, rank files may not: one without is of no set, whatever its name."""
    path = alone / RANK_0
    toys.write_weights(path, toys.read_weights(path), metadata)
    fault = f"{RANK_0}: not a file of a converted set; fetch or convert the set again"
    assert everyone(alone) == {"load": fault, "merge": fault, "convert": f"{fault}; or add --overwrite"}


def test_a10_every_file_written_says_format_pt(source: Path, tmp_path: Path) -> None:
    """Rank files, the shared file and merged weights all carry `format: pt`; the source's own is in the manifest."""
    for path in source.glob("*.safetensors"):
        toys.write_weights(path, toys.read_weights(path), {"modelspec.x": "y"})
    manifest = convert(source, tmp_path / "out", tp=2)
    merge(tmp_path / "out", tmp_path / "merged", max_shard_nbytes=10**6)
    written = [*(tmp_path / "out" / "tp2").glob("*.safetensors"), *(tmp_path / "merged").glob("*.safetensors")]
    assert len(written) > 4
    for path in written:
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
    assert {tuple(file.metadata.items()) for file in manifest.source.files} == {(("modelspec.x", "y"),)}


def test_a1_a_misaligned_rank_file_is_no_file_of_ours(alone: Path) -> None:
    """Every rank file is written with its data on a page; one moved off it is not the one that was written."""
    path = alone / RANK_0
    header = FileHeader.read(path)
    assert header.data_start % 4096 == 0
    toys.write_weights(path, toys.read_weights(path), dict(header.metadata))
    assert all("its header is not the one the manifest describes" in said for said in everyone(alone).values())


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders list their files in the reverse order."""
    listdir, scandir = os.listdir, os.scandir

    class Reversed:
        def __init__(self, path: Any = ".") -> None:
            with scandir(path) as entries:
                self.entries = sorted(entries, key=lambda each: each.name, reverse=True)

        def __enter__(self) -> Reversed:
            return self

        def __exit__(self, *error: object) -> None: ...

        def __iter__(self) -> Iterator[Any]:
            return iter(self.entries)

    monkeypatch.setattr(os, "listdir", lambda path=".": sorted(listdir(path), reverse=True))
    monkeypatch.setattr(os, "scandir", Reversed)


def test_b11_a_rank_is_read_from_its_file_whatever_the_listing(source: Path, tmp_path: Path, backwards: None) -> None:
    """With 12 ranks, where names sort otherwise than numbers might, each rank gets its own part of every tensor."""
    convert(source, tmp_path / "out", tp=12)
    folder = tmp_path / "out" / "tp12"
    expected = whole(source)[WEIGHT].chunk(12, 1)
    for rank in range(12):
        (mine, _) = open_files(folder, Manifest.read(folder), [rank])
        assert mine.rank == rank == json.loads(mine.header.metadata["shardconv"])["rank"]
        assert torch.equal(safetensors.torch.load_file(mine.path)[WEIGHT], expected[rank])
    merge(tmp_path / "out", tmp_path / "merged")
    merged = whole(tmp_path / "merged")
    assert all(torch.equal(merged[key], tensor) for key, tensor in whole(source).items())


@pytest.mark.parametrize(("one", "other"), [(2, 10), (1, 11)])
def test_b11_exchanged_rank_files_are_refused_by_both_names(source: Path, tmp_path: Path, one: int, other: int) -> None:
    """Rank 2's file under rank 10's name has the right shapes; what it says about itself gives it away."""
    convert(source, tmp_path / "out", tp=12)
    folder = tmp_path / "out" / "tp12"
    paths = [folder / f"rank-{rank:05d}-of-00012.safetensors" for rank in (one, other)]
    shutil.move(paths[0], tmp_path / "aside")
    shutil.move(paths[1], paths[0])
    shutil.move(tmp_path / "aside", paths[1])
    with pytest.raises(SetError) as caught:
        open_files(folder, Manifest.read(folder), range(12))
    assert [issue.split(";")[0] for issue in caught.value.issues] == [
        f"{paths[0].name}: expected rank {one}, found {other}",
        f"{paths[1].name}: expected rank {other}, found {one}",
    ]


@pytest.mark.parametrize("tp", [2, 4])
def test_i6_column_slices_of_the_last_layer_are_written_like_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """The last layer has a rowwise weight and two-dimensional scales; every slice equals torch's and reads back."""

    def scales(model: toys.ToyTransformer) -> None:
        for linear in (model.blocks[-1].ff.proj, model.blocks[-1].ff.out):
            linear.register_parameter("group_scale", torch.nn.Parameter(torch.ones(linear.out_features, 4)))

    model = toys.build(toys.install(monkeypatch, scales))
    toys.save(model, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", tp=tp)
    state = whole(tmp_path / "in")
    for rank, made in enumerate(toys.rank_states(tmp_path / "out" / f"tp{tp}")):
        assert torch.equal(made["blocks.1.ff.out.weight"], state["blocks.1.ff.out.weight"].chunk(tp, 1)[rank])
        assert torch.equal(made["blocks.1.ff.proj.group_scale"], state["blocks.1.ff.proj.group_scale"].chunk(tp)[rank])
        assert torch.equal(made["blocks.1.ff.out.group_scale"], state["blocks.1.ff.out.group_scale"])


def test_d4_tensors_of_dtypes_that_torch_lacks_come_back_from_a_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicated tensors are bytes: six-bit floats, unknown to torch, survive converting and merging."""
    odd = {
        "f6": ("F6_E2M3", (4,), b"abc"),
        "f4": ("F4", (4, 2), b"\x12\x34\x56\x78"),
        "e8": ("F8_E8M0", (2,), b"\xff\0"),
    }

    def change(model: toys.ToyTransformer) -> None:
        for name, (_, shape, _) in odd.items():
            model.register_buffer(name, torch.zeros(shape))

    model = toys.build(toys.install(monkeypatch, change), num_layers=1)
    state = {key: toys.raw(tensor) for key, tensor in model.state_dict().items() if key not in odd}
    toys.save_flat(model, tmp_path / "in", state | odd)
    convert(tmp_path / "in", tmp_path / "out", tp=2)
    merge(tmp_path / "out", tmp_path / "merged")
    assert toys.read_weights(tmp_path / "merged" / toys.SINGLE) == state | odd
    convert(tmp_path / "in", tmp_path / "one", tp=1)
    with pytest.raises(shardconv.ShardconvError, match=r"torch \S+ has no such dtype"):
        loader.load_model(tmp_path / "one", device="cpu")


def test_b6_three_faults_have_three_messages(source: Path, tmp_path: Path) -> None:
    """Not in the index, shard absent, shard without the tensor: three causes are told apart, each with its file."""
    listed: dict[str, str] = json.loads((source / toys.INDEX).read_text())["weight_map"]
    said = {}
    for kind in ("unlisted", "absent", "lacking"):
        folder = Path(shutil.copytree(source, tmp_path / kind))
        victim = folder / listed[WEIGHT]
        if kind == "unlisted":
            toys.edit_json(folder / toys.INDEX, weight_map={k: v for k, v in listed.items() if k != WEIGHT})
        elif kind == "absent":
            victim.unlink()
        else:
            toys.write_weights(victim, {k: v for k, v in toys.read_weights(victim).items() if k != WEIGHT})
        with pytest.raises(CheckpointError) as caught:
            convert(folder, tmp_path / "out", tp=2)
        (said[kind],) = caught.value.issues
        assert listed[WEIGHT] in said[kind]
    assert "is not in" in said["unlisted"]
    assert "absent from" in said["absent"]
    assert "which lacks it; the file is of another revision" in said["lacking"]
