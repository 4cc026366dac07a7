"""One set, many degrees: a set whose tp degree is a multiple of the group's loads as if it had been made for it."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import ranks
import small_sets
import torch
import toys
from diffusers.configuration_utils import ConfigMixin, register_to_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import loader
import shardconv
from loader import load
from loader.files.locate import find_set
from loader.transfer import join as joining
from shardconv.format.cut import Cut
from shardconv.format.header import FileHeader
from shardconv.format.manifest import Manifest
from shardconv.format.sets import SetFile
from shardconv.libraries.skeleton import kept_in_fp32
from shardconv.plans.catalogue import small_models

CPU = torch.device("cpu")
FP32_TOLERANCE = 1e-5  # of the largest output
MB = 1 << 20
DTYPES = (
    torch.bool, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.int16, torch.float32, torch.int64,
    torch.complex64,
)  # fmt: skip


# --- the arithmetic, against plain torch slicing ---


def sliced(tensor: torch.Tensor, dim: int, blocks: tuple[int, ...], rank: int, tp: int) -> torch.Tensor:
    """What rank `rank` of `tp` holds of a whole tensor: of every block its part."""
    return torch.cat([block.chunk(tp, dim)[rank] for block in tensor.split(blocks, dim)], dim)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


Whole = tuple[torch.Tensor, Cut | None]


@st.composite
def wholes(draw: Any, degree: int) -> Whole:
    """A tensor of random bytes, and how a set of `degree` may cut it."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), min_size=0, max_size=3))
    cut = None
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        blocks = tuple(degree * num for num in draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
        shape[dim], cut = sum(blocks), Cut(dim, blocks)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, [torch.Size(shape).numel() * dtype.itemsize], dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape), cut


@st.composite
def sets(draw: Any) -> tuple[int, int, dict[str, Whole]]:
    """Number of ranks, slices each of them joins, and the tensors of a set of the degree that this makes."""
    size, per_rank = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([2, 3, 4]))
    found = draw(st.lists(wholes(size * per_rank), min_size=1, max_size=4))
    return size, per_rank, {f"t{position}": whole for position, whole in enumerate(found)}


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_set=sets())
def test_joined_slices_are_those_of_the_smaller_degree(given_set: tuple[int, int, dict[str, Whole]], tmp_path: Path):
    """A set of degree k * n, joined for any rank of n, is plain torch slicing of the whole for n, bit for bit."""
    size, per_rank, tensors = given_set
    degree = size * per_rank
    files = []
    for rank in range(degree):
        held = {n: sliced(t, cut.dim, cut.block_sizes, rank, degree) if cut else t for n, (t, cut) in tensors.items()}
        path = toys.write_weights(tmp_path / f"rank-{rank}.safetensors", held)
        files.append(SetFile(path, rank, FileHeader.read(path)))
    cuts = {name: cut for name, (_, cut) in tensors.items()}
    for rank in range(size):
        found = joining.join(files[rank * per_rank : (rank + 1) * per_rank], degree, cuts, CPU)
        assert list(found) == [entry.name for entry in files[0].header.tensors]
        for name, (whole, cut) in tensors.items():
            expected = sliced(whole, cut.dim, cut.block_sizes, rank, size) if cut else whole
            assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape)
            assert torch.equal(as_bytes(found[name]), as_bytes(expected)), name
            assert found[name].is_contiguous()


def test_a_file_that_shrinks_while_it_is_joined_is_named(tmp_path: Path):
    """A file that another process shortens after its header was read is an error with its name, not a dead process."""
    files = []
    for rank in range(2):
        path = toys.write_weights(tmp_path / f"rank-{rank}.safetensors", {"t": torch.ones(1000)})
        files.append(SetFile(path, rank, FileHeader.read(path)))
    os.truncate(files[1].path, files[1].path.stat().st_size - 1)
    with pytest.raises(shardconv.SetError, match=r"^rank-1.safetensors: ends at byte [\d,]+, its header promised more"):
        joining.join(files, 2, {"t": Cut(0, (2000,))}, CPU)


# --- whole models ---


def parameters_of(path: Path) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in loader.load_model(path, device="cpu").state_dict().items()}


def load_and_run(path: Path, name: str, options: dict[str, Any]) -> list[torch.Tensor]:
    return small_sets.outputs(loader.load_model(path, device="cpu", **options), name)


@pytest.mark.parametrize("self_contained", [False, True])
@pytest.mark.parametrize("name", small_sets.NAMES)
def test_one_process_takes_a_tp4_set_as_the_whole_model(name: str, self_contained: bool):
    """Without a process group a tp 4 set is the model of `from_pretrained`, bit for bit, and can be saved as such."""
    options = {"self_contained": True} if self_contained else {}
    found = loader.load_model(small_sets.converted(name, 4, **options), device="cpu")
    expected = type(found).from_pretrained(small_sets.source(name))
    assert list(found.state_dict()) == list(expected.state_dict())
    for key, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key
    assert all(map(torch.equal, small_sets.outputs(found, name), small_sets.outputs(expected, name)))
    assert type(found.transformer_blocks[0]) is type(expected.transformer_blocks[0])
    assert getattr(found, "_parallel_config", None) is None


@pytest.mark.slow
@pytest.mark.parametrize("self_contained", [False, True])
@pytest.mark.parametrize("name", small_sets.NAMES)
def test_two_ranks_take_a_tp4_set_as_a_tp2_set(name: str, self_contained: bool):
    """A tp 4 set on 2 ranks gives each rank the tp 2 set's tensors, and the unsharded model's output."""
    options = {"self_contained": True} if self_contained else {}
    out = small_sets.converted(name, 4, **options)
    expected = small_sets.outputs(small_sets.build(name), name)
    for outputs in ranks.values(load_and_run, out, name, {"verify": True}):
        assert small_sets.difference(outputs, expected) <= FP32_TOLERANCE
    pairs = zip(
        ranks.values(parameters_of, out), ranks.values(parameters_of, small_sets.converted(name, 2)), strict=True
    )
    for joined, own in pairs:
        assert list(joined) == list(own)
        assert all(torch.equal(joined[key], own[key]) for key in own)


@pytest.mark.slow
def test_a_tp8_set_loads_on_4_2_and_1_ranks(tmp_path: Path):
    """What a tp 8 set gives on 4, 2 and 1 ranks is what sets of tp 4, 2 and 1 give, bit for bit."""
    monkeypatch = pytest.MonkeyPatch()
    source = toys.save(toys.build(toys.install(monkeypatch)), tmp_path / "source")
    for degree in (8, 4, 2, 1):
        shardconv.convert(source, tmp_path / f"tp{degree}", tp=degree)
    monkeypatch.undo()
    for size in (4, 2, 1):
        found, expected = (ranks.values(toy_parameters, tmp_path / f"tp{degree}", n=size) for degree in (8, size))
        for joined, own in zip(found, expected, strict=True):
            assert list(joined) == list(own)
            assert all(torch.equal(joined[key], own[key]) for key in own)


def toy_parameters(path: Path) -> dict[str, torch.Tensor]:
    with mock.patch.object(diffusers, toys.NAME, type(toys.NAME, (toys.ToyTransformer,), {}), create=True):
        return parameters_of(path)


def test_a_cast_is_that_of_from_pretrained():
    """`dtype=` on joined tensors rounds as diffusers does."""
    found = loader.load_model(small_sets.converted("flux2", 4), device="cpu", dtype=torch.bfloat16)
    expected = type(found).from_pretrained(small_sets.source("flux2"), torch_dtype=torch.bfloat16)
    assert all(torch.equal(found.state_dict()[key], value) for key, value in expected.state_dict().items())


# --- which set, which files ---


@pytest.mark.parametrize(
    ("degrees", "size", "taken"),
    [((1, 2, 4, 8), 2, 2), ((4, 8), 2, 4), ((3, 4, 8), 2, 4), ((4, 12), 3, 12), ((4, 2), 1, 2), ((16, 10), 5, 10)],
)
def test_the_own_degree_comes_first_then_the_smallest_multiple(degrees, size, taken, tmp_path: Path):
    """Of several sets the one of the group's degree is taken, else the smallest whose files can be joined."""
    for degree in degrees:
        (tmp_path / f"tp{degree}").mkdir()
        (tmp_path / f"tp{degree}" / "shardconv.json").write_text("{}")
    assert find_set(tmp_path, None, size) == tmp_path / f"tp{taken}"


def test_a_rank_needs_only_the_files_it_joins(tmp_path: Path):
    """Files of other ranks may be missing, those of its own are opened, and a missing one of them is named."""
    from loader.files.validate import open_set

    out = small_sets.copied(small_sets.converted("flux", 4), tmp_path / "out")
    names = [f"rank-0000{rank}-of-00004.safetensors" for rank in range(4)]
    for name in names[:2]:
        (out / "tp4" / name).unlink()
    assert [file.rank for file in open_set(out / "tp4", 1, 2).files] == [2, 3, None]
    with pytest.raises(shardconv.SetError) as caught:
        open_set(out / "tp4", 0, 2)
    assert [name in issue for name, issue in zip(names, caught.value.issues, strict=False)] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_verify_checks_every_slice_that_is_joined(rank: int, tmp_path: Path):
    """One flipped bit in any of the files that a rank joins is found, with file and tensor."""
    out = small_sets.copied(small_sets.converted("flux2", 4), tmp_path / "out")
    path = out / "tp4" / f"rank-0000{rank}-of-00004.safetensors"
    header = FileHeader.read(path)
    victim = header.tensors[-1]
    with open(path, "r+b") as file:
        file.seek(header.data_start + victim.end - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    outcome = ranks.same(ranks.run(load_and_run, out, "flux2", {"verify": True}))
    assert outcome.text == (
        f"rank {rank // 2}: {path.name}: {victim.name} is damaged (its digest differs); fetch it again"
    )


@pytest.mark.slow
def test_swapped_rank_files_are_refused_when_joined(tmp_path: Path):
    """Two files of one rank in each other's place would join in the wrong order: the rank in the file is compared."""
    out = small_sets.copied(small_sets.converted("flux", 4), tmp_path / "out")
    first, second = (out / "tp4" / f"rank-0000{rank}-of-00004.safetensors" for rank in (2, 3))
    shutil.move(first, out / "aside")
    shutil.move(second, first)
    shutil.move(out / "aside", second)
    outcome = ranks.same(ranks.run(load_and_run, out, "flux", {}))
    assert [issue.partition(";")[0] for issue in outcome.issues] == [
        f"rank 1: {first.name}: expected rank 2, found 3",
        f"rank 1: {second.name}: expected rank 3, found 2",
    ]


# --- memory ---


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)


class Large(diffusers.ModelMixin, ConfigMixin):
    """32 MB colwise and 32 MB rowwise, in layers of 4 MB each, and 16 MB whole."""

    _tp_plan = {"pairs.*.up": "colwise", "pairs.*.down": "rowwise"}  # noqa: RUF012 (as diffusers declares it)

    @register_to_config
    def __init__(self, width: int = 1024, layers: int = 8) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair(width) for _ in range(layers))
        self.whole = nn.Linear(width, 4 * width, bias=False)


def peak_of_loading(path: Path, dtype: torch.dtype | None) -> int:
    """Most private memory while loading, in bytes above what was there before."""
    ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: what is freed goes back to the system, to be counted
    with mock.patch.object(diffusers, "Large", Large, create=True):
        loader.load_model(path, device="cpu", dtype=dtype)  # lazy imports and pools are not ours
        before = private_memory()
        highest = 0

        def watched(function: Any) -> Any:
            def call(*args: Any) -> Any:
                nonlocal highest
                result = function(*args)
                highest = max(highest, private_memory() - before)
                return result

            return call

        reading = mock.patch.object(os, "preadv", watched(os.preadv))
        with reading, mock.patch.object(load, "kept_in_fp32", watched(kept_in_fp32)):  # asked at every cast
            model = loader.load_model(path, device="cpu", dtype=dtype)
        assert model.whole.weight.numel()
        return max(highest, private_memory() - before)


def private_memory() -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon:"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["stored", "bf16"])
def test_g1_joining_takes_no_more_than_the_result_and_one_tensor(dtype, tmp_path: Path, monkeypatch):
    """Private memory while a tp 4 set loads on 2 ranks: the joined tensors once, one more, and a little slack."""
    monkeypatch.setattr(diffusers, "Large", Large, raising=False)
    model = Large()
    small_models.randomize(model, 3)
    model.save_pretrained(tmp_path / "source")
    shardconv.convert(tmp_path / "source", tmp_path / "out", tp=4)
    manifest = Manifest.read(tmp_path / "out" / "tp4")
    joined = sum(tensor.slice_nbytes(2) for tensor in manifest.tensors if tensor.cut)
    assert joined == 32 * MB
    cast = 8 * MB if dtype else 0  # of the mapped tensor, before the joined ones shrink
    for peak in ranks.values(peak_of_loading, tmp_path / "out", dtype):
        assert joined <= peak <= joined + cast + 2 * MB + 4 * MB
