"""Reading into memory and through the ring, before an accelerator whose copies are late; nothing may be left behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import handmade
import late_device
import pytest
import ranks
import small_sets
import torch
from safetensors.torch import load_file, save_file

import loader
import shardconv
from loader.transfer import chunks
from loader.transfer.mapping import map_file
from loader.transfer.read import read_file, read_into_memory
from loader.transfer.ring import _Ring
from shardconv.format.header import FileHeader

CPU = torch.device("cpu")
LATE = "late:0"  # a torch.device only where late_device is installed
KB, MB = 1 << 10, 1 << 20
CHUNKS = (4 * KB, 8 * KB, 64 * KB, MB, 4 * MB, 16 * MB)

Tensors = dict[str, torch.Tensor]
Reader = Callable[[Path], Tensors]
WAYS: dict[str, Reader] = {
    "ring": lambda path: read_file(path, FileHeader.read(path), CPU, 4 * KB),
    "memory": lambda path: read_into_memory(path, FileHeader.read(path)),
}
mapped: Reader = lambda path: map_file(path, FileHeader.read(path))  # noqa: E731
each_reader = pytest.mark.parametrize("read", WAYS.values(), ids=WAYS)


def numbers(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, [nbytes], dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def saved(path: Path, nbytes: int) -> Path:
    """A file of two tensors, written by safetensors."""
    save_file({"large": numbers(nbytes // 4 * 4).view(torch.int32), "odd": numbers(7, 1)}, path)
    return path


def differing(found: Tensors, path: Path) -> list[str]:
    """Names of tensors that are not what safetensors reads."""
    expected = load_file(path)
    assert set(found) == set(expected)
    return [name for name, tensor in expected.items() if not torch.equal(found[name].to("cpu"), tensor)]


def held() -> tuple[set[str], set[threading.Thread]]:
    """Open descriptors with what they lead to, but for the socket to the process that `ranks` starts; and threads."""
    links = {fd: f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    leads = {f"{fd} {os.readlink(link)}" for fd, link in links.items() if os.path.lexists(link)}
    return {each for each in leads if "socket:" not in each}, set(threading.enumerate())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does, no descriptor and no thread stays."""
    gc.collect()  # what earlier tests left for later
    before = held()
    yield
    assert held() == before


# --- where tensors stand, and what holds their memory ---


@pytest.mark.slow
@each_reader
@pytest.mark.parametrize("within", [False, True], ids=["data", "tensor"])
def test_data_and_tensors_may_start_at_any_address(within, read, tmp_path):
    """The data part, or a tensor inside it, may start at each of 0 to 63 bytes past a boundary (A1)."""
    data, path = numbers(96, 2), tmp_path / "x.safetensors"
    for shift in range(64):
        first = shift if within else 0
        header = {
            "first": handmade.entry("U8", [first], 0, first),
            "second": handmade.entry("I32", [24], first, first + 96),
        }
        text = json.dumps(header)
        pad = -(8 + len(text)) % 64 + (0 if within else shift)
        path.write_bytes(handmade.raw_file(text + " " * pad, bytes(first) + data.numpy().tobytes()))
        found = read(path)
        assert found["second"].tolist() == data.view(torch.int32).tolist()
        assert found["first"].shape == (first,)


@pytest.mark.slow
@pytest.mark.parametrize("read", [*WAYS.values(), mapped], ids=[*WAYS, "map"])
def test_one_view_keeps_its_memory(read, tmp_path):
    """A single tensor left of a file, or a slice of it, keeps its bytes after all the others and the file are gone."""
    path = saved(tmp_path / "x.safetensors", MB)
    view = read(path)["large"][1000:2000]
    path.unlink()
    gc.collect()
    others = [torch.full([MB], 255, dtype=torch.uint8) for _ in range(8)]
    assert torch.equal(view, numbers(MB).view(torch.int32)[1000:2000])
    assert len(others) == 8


def test_tensors_read_into_memory_own_their_bytes_and_nothing_else(tmp_path):
    """Each has a storage of its own size, and writing to one reaches neither the file nor its neighbour."""
    path = saved(tmp_path / "x.safetensors", 64 * KB)
    before = path.read_bytes()
    found = WAYS["memory"](path)
    assert [each.untyped_storage().nbytes() for each in found.values()] == [each.nbytes for each in found.values()]
    found["large"].fill_(-1)
    assert torch.equal(found["odd"], numbers(7, 1))
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [0, 4, 4 * KB, 100_000, 16 * MB - 8, 16 * MB, 16 * MB + 4, 40 * MB])
def test_memory_holds_files_shorter_and_longer_than_a_chunk(nbytes, tmp_path):
    """Reading into plain memory gives what safetensors reads, whatever the number of chunks."""
    path = saved(tmp_path / "x.safetensors", nbytes)
    assert differing(WAYS["memory"](path), path) == []


@pytest.mark.slow
@each_reader
def test_a_file_of_nothing_but_a_header(read, tmp_path):
    """No tensors, or empty ones: nothing is read and nothing fails."""
    path = tmp_path / "x.safetensors"
    save_file({"none": torch.empty(0, 8)}, path)
    assert read(path)["none"].shape == (0, 8)
    save_file({}, path)
    assert read(path) == {}


# --- what goes wrong while reading ---

Preadv = Callable[[int, list[memoryview], int], int]


def reading(preadv: Preadv) -> Any:
    return mock.patch.object(os, "preadv", preadv)


@pytest.mark.slow
@each_reader
def test_short_reads_are_taken_up(read, tmp_path):
    """The system may give fewer bytes than were asked for."""
    path, preadv = saved(tmp_path / "x.safetensors", 50_000), os.preadv
    with reading(lambda fd, buffers, offset: preadv(fd, [buffers[0][:999]], offset)):
        assert differing(read(path), path) == []


@pytest.mark.slow
@each_reader
def test_j2_a_file_shortened_meanwhile_is_an_ordinary_error(read, tmp_path):
    """A file cut while it is read ends in an error that says where; a mapping would end the process."""
    path, preadv = saved(tmp_path / "x.safetensors", 33 * MB), os.preadv
    header = FileHeader.read(path)

    def cutting(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(path, header.data_start + MB + 5)
        return preadv(fd, buffers, offset)

    told = r"^x.safetensors: ends at byte [\d,]+, its header promised more; fetch it again$"
    with reading(cutting), pytest.raises(shardconv.SetError, match=told):
        read(path)


@pytest.mark.slow
@each_reader
def test_a_reader_that_fails_half_way_is_heard(read, tmp_path):
    """The error of one reader is raised as it is."""
    path, preadv, broken = saved(tmp_path / "x.safetensors", 20 * MB), os.preadv, OSError(errno.EIO, "broken")
    half = path.stat().st_size // 2  # in the second chunk of one reader

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= half:
            raise broken
        return preadv(fd, buffers, offset)

    with reading(failing), pytest.raises(OSError, match="broken") as caught:
        read(path)
    assert caught.value is broken


def test_a_reader_without_buffers_stops_the_others(tmp_path):
    """When memory for one reader's buffers is refused, the rest does not read on to the end first."""
    path, preadv, asked = saved(tmp_path / "x.safetensors", MB), os.preadv, []
    made, ring = [], _Ring

    def refuse(*args: Any) -> Any:
        made.append(args)
        if len(made) == 2:
            raise MemoryError("no room")
        return ring(*args)

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(offset)
        while len(made) < 2:
            pass
        return preadv(fd, buffers, offset)

    refusing = mock.patch("loader.transfer.ring._Ring", refuse)
    with refusing, reading(counted), pytest.raises(MemoryError, match="no room"):
        read_file(path, FileHeader.read(path), CPU, 4 * KB)
    assert len(asked) < 200  # of 257


# --- before a device whose copies are late ---


def read_late(paths: list[Path], chunks: tuple[int, ...]) -> list[str]:
    """What differs after reading each file with each chunk size to the late device."""
    wrong = []
    with late_device.installed():
        for path in paths:
            for chunk in chunks:
                found = read_file(path, FileHeader.read(path), torch.device(LATE), chunk)
                assert all(tensor.device == torch.device(LATE) for tensor in found.values())
                wrong += [f"{path.name} at {chunk}: {name}" for name in differing(found, path)]
    return wrong


def on_one(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a process of its own."""
    return ranks.values(function, *args, n=1, group=False)[0]


@pytest.mark.slow
@pytest.mark.late
def test_late_copies_arrive_whole(tmp_path):
    """Files shorter and longer than a chunk arrive bit for bit, at every chunk size, though no copy happens in time."""
    sizes = (0, 4, 4 * KB, 100_000, MB, 5 * MB + 4)
    assert on_one(read_late, [saved(tmp_path / f"{nbytes}", nbytes) for nbytes in sizes], CHUNKS) == []


def pinned(path: Path, chunk: int) -> list[int]:
    assert read_late([path], (chunk,)) == []
    return late_device.pinned_nbytes


@pytest.mark.slow
@pytest.mark.late
@pytest.mark.parametrize("nbytes", [3 * MB, 40 * MB])
def test_pinned_memory_is_two_chunks_a_reader(nbytes, tmp_path):
    """Whatever the file, two buffers of a chunk (torch pins powers of two) for each reader that has something to do."""
    readers = min(chunks.READERS, nbytes // MB)
    assert on_one(pinned, saved(tmp_path / "x.safetensors", nbytes - 100), MB) == [MB] * 2 * readers


def read_carelessly(path: Path, owner: Any, name: str) -> list[str]:
    with mock.patch.object(owner, name, return_value=None):
        return read_late([path], (4 * KB,))


@pytest.mark.slow
@pytest.mark.late
@pytest.mark.parametrize("careless", [late_device.LateEvent, late_device.LateStream], ids=["buffers", "end"])
def test_without_waiting_bytes_would_be_wrong(careless, tmp_path):
    """The stand-in is late enough: were no event or no stream waited for, the result would differ."""
    path = saved(tmp_path / "x.safetensors", MB)
    assert "x.safetensors at 4096: large" in on_one(read_carelessly, path, careless, "synchronize")


def fail_on_device(path: Path, what: str, after: int) -> tuple[str, bool, bool, bool]:
    """The error's text when the device fails at its call number `after`; whether copies wait on, things are left."""
    before, calls = held(), []
    owner, name = {
        "copy": (late_device, "_copy"),
        "event": (late_device.LateEvent, "synchronize"),
        "stream": (late_device.LateStream, "__init__"),
    }[what]
    original = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == after:
            raise RuntimeError("device lost")
        return original(*args, **kwargs)

    text = ""
    with late_device.installed(), mock.patch.object(owner, name, failing):
        try:
            read_file(path, FileHeader.read(path), torch.device(LATE), 4 * KB)
        except RuntimeError as error:
            text = str(error)
        waiting = any(stream.num_done < len(stream.waiting) for stream in late_device._streams)
    return text, waiting, held()[0] == before[0], held()[1] == before[1]


@pytest.mark.slow
@pytest.mark.late
@pytest.mark.parametrize(("what", "after"), [("copy", 1), ("copy", 9), ("event", 1), ("event", 5), ("stream", 2)])
def test_a_failing_device_is_heard_and_nothing_is_left(what, after, tmp_path):
    """An error of the device is raised as it is; no copy from a freed buffer is under way, no thread or file left."""
    path = saved(tmp_path / "x.safetensors", MB)
    assert on_one(fail_on_device, path, what, after) == ("device lost", False, True, True)


def load_late(path: Path, options: dict[str, Any]) -> list[str]:
    """Names of parameters of a model loaded to the late device that differ from those loaded to the CPU."""
    with late_device.installed():
        expected = dict(loader.load_model(path, device="cpu").named_parameters())
        found = dict(loader.load_model(path, device=LATE, **options).named_parameters())
        assert {str(tensor.device) for tensor in found.values()} == {LATE}
        return [name for name, tensor in expected.items() if not torch.equal(found[name].to("cpu"), tensor)]


@pytest.mark.slow
@pytest.mark.late
@pytest.mark.parametrize("options", [{}, {"transfer": "mmap"}, {"verify": True}], ids=str)
def test_a_model_reaches_the_device(options):
    """`load_model` to an accelerator gives the parameters of a load to the CPU, by ring, by mapping and verified."""
    assert on_one(load_late, small_sets.converted("qwenimage", 1), options) == []
