"""`transfer=`: what a load maps, reads and holds, by each way to move the bytes."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import small_pipelines
import small_sets
import torch

import loader
import shardconv
from loader import load
from loader.files import validate
from loader.transfer.mapping import map_file
from loader.transfer.read import read_into_memory
from shardconv.format.header import FileHeader, TensorEntry, encode_header

NAME = "qwenimage"
WAYS = (None, "mmap", "read")
MB, GB = 1 << 20, 1 << 30
each_way = pytest.mark.parametrize("way", WAYS)


def mapped_files(folder: Path) -> set[str]:
    """Names of the files in `folder` that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split(None, 5)[5]).name for line in lines if str(folder) in line}


def equal(found: Any, expected: Any) -> bool:
    """Whether two models hold the same bits under the same names."""
    one, other = found.state_dict(), expected.state_dict()
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def unsharded(name: str = NAME) -> Any:
    return type(small_sets.build(name)).from_pretrained(small_sets.source(name))


@pytest.fixture
def out(tmp_path) -> Path:
    """A copy of a set for one rank."""
    return small_sets.copied(small_sets.converted(NAME, 1), tmp_path / "out")


# --- what is asked for ---


@pytest.mark.slow
@each_way
@pytest.mark.parametrize("verify", [False, True])
def test_each_way_gives_the_checkpoint(way, verify, out):
    """The parameters are those of diffusers, bit for bit; only "read" leaves no file mapped on the CPU."""
    model = loader.load_model(out, device="cpu", transfer=way, verify=verify)
    assert equal(model, unsharded())
    expected = {path.name for path in out.rglob("*.safetensors")}
    assert mapped_files(out) == (set() if way == "read" else expected)


@pytest.mark.parametrize("way", ["map", "direct", "", 1, True])
def test_another_way_is_refused_with_those_there_are(way, out):
    """A wrong value is a `UsageError` that names the right ones, before anything is read."""
    with pytest.raises(shardconv.UsageError, match=rf"^transfer: expected 'mmap' or 'read', found {way!r}$"):
        loader.load_model(out, device="cpu", transfer=way)


def load_by(path: Path, way: Any) -> str:
    loader.load_model(path, device="cpu", transfer=way[torch.distributed.get_rank()])
    return "loaded"


@pytest.mark.slow
def test_a_wrong_way_is_refused_on_every_rank():
    """Asked of one rank only, it is refused on all; two right ways may go together."""
    path = small_sets.converted(NAME, 2)
    refused = ranks.same(ranks.run(load_by, path, ["mmap", "nfs"]))
    assert (refused.error, refused.text) == ("LoadError", "rank 1: transfer: expected 'mmap' or 'read', found 'nfs'")
    assert ranks.values(load_by, path, ["mmap", "read"]) == ["loaded", "loaded"]


@pytest.mark.slow
def test_a_pipeline_hands_it_on(tmp_path):
    """`load_pipeline(transfer="read")` maps none of the set's files; without it they are mapped."""
    small_pipelines.build_flux_pipeline().save_pretrained(tmp_path / "source")
    shardconv.convert(tmp_path / "source", tmp_path / "out", tp=1)
    for way in ("read", None):
        pipeline = loader.load_pipeline(tmp_path / "out", device="cpu", transfer=way)
        assert bool(mapped_files(tmp_path / "out" / "transformer" / "tp1")) is (way is None)
        del pipeline
        gc.collect()


@each_way
@pytest.mark.parametrize("verify", [False, True])
def test_a_load_that_is_given_up_leaves_no_thread(way, verify, out):
    """When the model does not fit, reading and hashing stop."""
    before = set(threading.enumerate())
    wrong = mock.patch.object(load, "check_model", side_effect=shardconv.SetError("another model"))
    with wrong, pytest.raises(shardconv.SetError, match="another model"):
        loader.load_model(out, device="cpu", transfer=way, verify=verify)
    assert set(threading.enumerate()) == before


def test_hashing_stops_when_a_load_is_given_up(out):
    """Once the model turned out not to fit, the rest is not hashed first."""
    hashed, given_up = [], threading.Event()

    def slow(tensor: torch.Tensor) -> str:
        given_up.wait(10)
        time.sleep(0.02)  # for the others to hear of it
        hashed.append(tensor)
        return ""

    def refuse(*args: Any) -> None:
        given_up.set()
        raise shardconv.SetError("another model")

    with (
        mock.patch.object(validate, "_digest", slow),
        mock.patch.object(load, "check_model", refuse),
        pytest.raises(shardconv.SetError, match="another model"),
    ):
        loader.load_model(out, device="cpu", verify=True)
    assert len(hashed) <= 2 * max(2, os.cpu_count() or 1)


@each_way
def test_verify_finds_damage_in_each_way(way, out):
    """A flipped bit is found whichever way the bytes went, every damaged tensor named in the order of the file."""
    path = out / "tp1" / "rank-00000-of-00001.safetensors"
    header = FileHeader.read(path)
    damaged = [header.tensors[0], header.tensors[-1]]
    with open(path, "r+b") as file:
        for entry in damaged:
            file.seek(header.data_start + entry.end - 1)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    with pytest.raises(shardconv.SetError) as caught:
        loader.load_model(out, device="cpu", transfer=way, verify=True)
    told = "{}: {} is damaged (its digest differs); fetch it again"
    assert caught.value.issues == tuple(told.format(path.name, entry.name) for entry in damaged)


# --- what another program does to the files ---


def test_after_read_the_files_do_not_matter(out):
    """A file emptied or rewritten after a load by "read" changes nothing; the model needs it no more."""
    model = loader.load_model(out, device="cpu", transfer="read")
    for path in out.rglob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size // 2))
    assert equal(model, unsharded())


def total(model: Any) -> float:
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


def load_and_cut(path: Path, way: str) -> float:
    """Sum over a model whose files are emptied after the load."""
    model = loader.load_model(path, device="cpu", transfer=way)
    for file in path.rglob("*.safetensors"):
        os.truncate(file, 0)
    return total(model)


@pytest.mark.slow
def test_j2_a_mapped_file_that_is_cut_ends_the_process_and_a_read_one_does_not(tmp_path):
    """As documented: SIGBUS, which no code can catch, for "mmap"; nothing at all for "read"."""
    by = {}
    for way in ("mmap", "read"):
        out = small_sets.copied(small_sets.converted(NAME, 1), tmp_path / way)
        by[way] = ranks.run(load_and_cut, out, way, n=1, group=False)[0]
    assert by["mmap"].error == "killed"
    assert "SIGBUS" in by["mmap"].text
    assert by["read"].value == total(unsharded())


@pytest.mark.parametrize("nbytes", [0, 5000, -1])
def test_j2_a_file_cut_between_check_and_read_is_an_ordinary_error(nbytes, out):
    """Cut after its header was checked, a file is a `SetError` of `load_model(transfer="read")`."""
    read = read_into_memory

    def cut_and_read(path: Path, header: FileHeader) -> Any:
        os.truncate(path, header.data_start + nbytes if nbytes >= 0 else header.file_nbytes - 1)
        return read(path, header)

    with (
        mock.patch.object(load, "read_into_memory", cut_and_read),
        pytest.raises(shardconv.SetError, match=r"^[\w-]+.safetensors: ends at byte [\d,]+, its header promised more"),
    ):
        loader.load_model(out, device="cpu", transfer="read")


# --- memory ---


def storages(path: Path, way: str | None) -> dict[str, tuple[int, int]]:
    model = loader.load_model(path, device="cpu", transfer=way)
    return {name: (each.untyped_storage().nbytes(), each.nbytes) for name, each in model.named_parameters()}


@pytest.mark.slow
@each_way
def test_g1_a_parameter_keeps_no_more_than_its_bytes_alive(way):
    """The storage of every parameter on every rank is as long as the parameter."""
    for found in ranks.values(storages, small_sets.converted("flux2", 2), way):
        assert len(found) > 20
        assert {held - own for held, own in found.values()} == {0}


def files_opened(path: Path, way: str | None) -> tuple[set[str], int]:
    """Names of files of the set that a load opens, and the bytes it reads by reading calls."""
    opened: set[str] = set()

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(path) in str(args[0]):
            opened.add(Path(os.fsdecode(args[0])).name)

    sys.addaudithook(audit)  # stays, but this process ends soon
    before = _chars_read()
    loader.load_model(path, device="cpu", transfer=way)
    return opened, _chars_read() - before


def _chars_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.slow
@each_way
def test_g2_a_rank_opens_its_own_file_and_the_shared_one(way):
    """Of four ranks' files each opens its own and the replicated one, and reads each byte at most once."""
    out = small_sets.converted("flux2", 4)
    for rank, (opened, nbytes) in enumerate(ranks.values(files_opened, out, way, n=4)):
        own = {f"rank-{rank:05d}-of-00004.safetensors", "replicated.safetensors"}
        assert opened == {*own, "shardconv.json", "config.json"}
        longest = sum((out / "tp4" / name).stat().st_size for name in own)
        other = 2 * MB  # headers, manifest, config, sources of Python modules
        assert nbytes <= (longest if way == "read" else 0) + other


def sparse(path: Path, nbytes: int) -> Path:
    """A file of one tensor of zeros that takes no disk."""
    header = encode_header([TensorEntry("zeros", "U8", (nbytes,), 0, nbytes)], {"format": "pt"})
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + nbytes)
    return path


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def memory_over_time(path: Path, name: str) -> tuple[int, int]:
    """Bytes resident above the start: with every page of the tensors touched, and after dropping them."""
    read = {"map_file": map_file, "read_into_memory": read_into_memory}[name]
    header = FileHeader.read(path)
    torch.zeros(MB, dtype=torch.uint8).sum()
    before = resident()
    tensors = read(path, header)
    assert int(tensors["zeros"][:: mmap.PAGESIZE].sum()) == 0
    used = resident() - before
    del tensors
    return used, resident() - before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["map_file", "read_into_memory"])
def test_g5_memory_is_given_back(name, tmp_path):
    """With the last tensor goes the memory: mapped or read, a process is as small as before."""
    path = sparse(tmp_path / "x.safetensors", 256 * MB)
    used, left = ranks.values(memory_over_time, path, name, n=1, group=False)[0]
    assert used >= 256 * MB
    assert left <= 8 * MB


# --- no memory to reserve ---

Mmap = Callable[..., mmap.mmap]


def strict(fileno: int, length: int, **options: int) -> mmap.mmap:
    """`mmap.mmap` of a system that counts every private mapping that could be written, and has no memory left."""
    if options["flags"] & mmap.MAP_PRIVATE and options["prot"] & mmap.PROT_WRITE:
        raise OSError(12, "Cannot allocate memory")
    return real(fileno, length, **options)


real: Mmap = mmap.mmap


def test_g6_without_memory_to_reserve_the_mapping_is_read_only(out):
    """Under strict overcommit a load maps read-only, says so once a file, and gives the same bits."""
    told = r"^[\w-]+\.safetensors: .* are read-only; writing to one in place would end the process$"
    with (
        mock.patch.object(mmap, "mmap", strict),
        pytest.warns(shardconv.ShardconvWarning, match=told) as warned,  # and nothing else, which would be an error
    ):
        model = loader.load_model(out, device="cpu")
    names = [str(each.message).partition(":")[0] for each in warned]
    assert sorted(names) == sorted(path.name for path in out.rglob("*.safetensors"))
    assert equal(model, unsharded())


def test_another_fault_of_a_mapping_is_raised(out):
    """Only "no memory" has a second try."""
    failing = mock.patch.object(mmap, "mmap", side_effect=OSError(19, "No such device"))
    with failing, pytest.raises(OSError, match="No such device"):
        loader.load_model(out, device="cpu")


def load_below_a_limit(path: Path, name: str) -> str:
    """The error of loading a file longer than the address space that is left."""
    header = FileHeader.read(path)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + GB, resource.RLIM_INFINITY))
    try:
        {"map_file": map_file, "read_into_memory": read_into_memory}[name](path, header)
    except OSError as error:
        return str(error)
    return "loaded"


@pytest.mark.slow
@pytest.mark.parametrize("read", [map_file, read_into_memory], ids=lambda function: function.__name__)
def test_g6_an_address_space_too_small_is_an_ordinary_error(read, tmp_path):
    """`ulimit -v` below the file ends neither way in a crash: the tensors need the room, and the error says so."""
    path = sparse(tmp_path / "x.safetensors", 4 * GB)
    text = ranks.values(load_below_a_limit, path, read.__name__, n=1, group=False)[0]
    assert text == "[Errno 12] Cannot allocate memory"
