"""Reading a file's bytes into tensors: the ring of readers, direct and cached, and the mapping."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import small_sets
import torch
from safetensors.torch import load_file

import shardconv
from loader.transfer import read as transfer
from loader.transfer.chunks import READERS
from loader.transfer.mapping import map_file
from loader.transfer.read import read_file
from shardconv.format.header import DATA_ALIGNMENT, FileHeader, TensorEntry, encode_header
from shardconv.system.pagecache import is_cached

CPU = torch.device("cpu")
KB, MB = 1 << 10, 1 << 20
RANK_0 = "rank-00000-of-00002.safetensors"


def write(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """A file as ours are: data on a 4096-byte boundary; name -> dtype, shape and bytes."""
    entries, position = [], 0
    for name, (dtype, shape, data) in tensors.items():
        entries.append(TensorEntry(name, dtype, shape, position, len(data)))
        position += len(data)
    header = encode_header(entries, {"format": "pt"})
    path.write_bytes(header + b"".join(data for _, _, data in tensors.values()))
    return path


def write_unaligned(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]], pad: int) -> Path:
    """The same tensors as another program may write them: no padding but `pad` spaces."""
    document, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    raw = json.dumps(document, separators=(",", ":")).encode() + b" " * pad
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(data for _, _, data in tensors.values()))
    return path


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return torch.randint(0, 256, [nbytes], dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).numpy(
    ).tobytes()  # fmt: skip


def ours(num_floats: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """A large tensor, then small ones of falling item size, the last with an odd number of bytes."""
    return {
        "large": ("I32", (num_floats // 4, 4), random_bytes(num_floats * 4)),
        "scalar": ("I32", (), random_bytes(4, 1)),
        "half": ("BF16", (2, 3), random_bytes(12, 2)),
        "empty": ("F32", (0, 8), b""),
        "odd": ("U8", (7,), random_bytes(7, 3)),
    }


def assert_equal(found: dict[str, torch.Tensor], path: Path) -> None:
    expected = load_file(path)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].contiguous().flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8)), name


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shardconv-read")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Whatever a test does, the readers are gone after it."""
    yield
    assert readers() == []


@pytest.fixture
def opened() -> Iterator[list[int]]:
    """Flags of each `os.open` of the reader."""
    flags: list[int] = []

    def spy(path: Path, flag: int, *mode: int) -> int:
        flags.append(flag)
        return open_(path, flag, *mode)

    open_ = os.open
    with mock.patch.object(os, "open", spy):
        yield flags


def drop_from_cache(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_cache(path: Path) -> bool:
    """Whether the middle of a file can be read without waiting for a disk. Asking may fetch it."""
    with open(path, "rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            assert error.errno == errno.EOPNOTSUPP  # a file system in memory  # noqa: PT017
    return True


# --- what comes back ---


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [4 * KB, 12 * KB, 64 * KB, MB, 16 * MB])
@pytest.mark.parametrize("num_floats", [0, 4, 1024, 4096, 100_000, 262_144 - 8, 262_144, 262_148])
def test_read_file_equals_safetensors(num_floats, chunk, tmp_path):
    """Every chunk size against files shorter, equal to and longer than a chunk gives what safetensors reads."""
    path = write(tmp_path / "x.safetensors", ours(num_floats))
    assert_equal(read_file(path, FileHeader.read(path), CPU, chunk), path)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", [RANK_0, "replicated.safetensors"])
def test_read_file_reads_a_set_past_the_cache_and_through_it(name, direct, opened):
    """A file of a real set is read alike with direct I/O and through the page cache."""
    path = small_sets.converted("flux2", 2) / "tp2" / name
    opened.clear()  # of what the conversion opened
    with mock.patch.object(transfer, "is_cached", return_value=not direct):
        found = read_file(path, FileHeader.read(path), CPU, 256 * KB)
    assert bool(opened[0] & os.O_DIRECT) is direct
    assert_equal(found, path)


def test_a_cold_file_is_read_past_the_cache_and_stays_out_of_it(tmp_path, opened):
    """A file that the page cache does not hold is read with direct I/O, which leaves the cache to others."""
    path = write(tmp_path / "x.safetensors", ours(MB))
    header = FileHeader.read(path)
    drop_from_cache(path)
    cold = not is_cached(path)  # everywhere but on a file system that is in memory
    found = read_file(path, header, CPU)
    assert bool(opened[0] & os.O_DIRECT) is cold
    assert is_cached(path) is not cold
    assert_equal(found, path)


def test_a_file_system_without_direct_io_is_read_through_the_cache(tmp_path):
    """Where `O_DIRECT` is refused with EINVAL, at the opening, the file is read as any program reads it."""
    path = write(tmp_path / "x.safetensors", ours(100_000))
    open_, flags = os.open, []

    def refuse(path: Path, flag: int) -> int:
        flags.append(bool(flag & os.O_DIRECT))
        if flag & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return open_(path, flag)

    with mock.patch.object(transfer, "is_cached", return_value=False), mock.patch.object(os, "open", refuse):
        found = read_file(path, FileHeader.read(path), CPU)
    assert flags == [True, False]
    assert_equal(found, path)


@pytest.mark.parametrize("function", [lambda p, h: read_file(p, h, CPU), map_file], ids=["read_file", "map_file"])
@pytest.mark.parametrize("pad", range(8))
def test_a1_a_source_with_any_header_length_is_read(pad, function, tmp_path):
    """Data may start at any address, as files of other programs do: bytes are copied, nothing crashes (A1)."""
    path = write_unaligned(tmp_path / "x.safetensors", ours(4096), pad)
    assert_equal(function(path, FileHeader.read(path)), path)


@pytest.mark.parametrize("function", [lambda p, h: read_file(p, h, CPU), map_file], ids=["read_file", "map_file"])
def test_a1_a_tensor_at_an_odd_offset_is_read(function, tmp_path):
    """An odd number of bytes stored first leaves what follows off its boundary; it is read all the same (A1)."""
    tensors = {"odd": ("U8", (3,), random_bytes(3)), "half": ("BF16", (8,), random_bytes(16, 1))}
    path = write(tmp_path / "x.safetensors", tensors)
    found = function(path, FileHeader.read(path))
    assert found["odd"].numpy().tobytes() == random_bytes(3)
    assert found["half"].clone().view(torch.uint8).numpy().tobytes() == random_bytes(16, 1)


@pytest.mark.parametrize("function", [lambda p, h: read_file(p, h, CPU), map_file], ids=["read_file", "map_file"])
@pytest.mark.parametrize(
    "tensors",
    [{}, {"none": ("F32", (0, 8), b"")}, {"none": ("BF16", (3, 0), b""), "too": ("U8", (0,), b"")}],
    ids=["no-tensor", "one-empty", "two-empty"],
)
def test_a5_a_file_without_data_gives_its_empty_tensors(tensors, function, tmp_path):
    """A header alone is a file like any other: its tensors have their shapes and no elements."""
    path = write(tmp_path / "x.safetensors", tensors)
    found = function(path, FileHeader.read(path))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {n: t[1] for n, t in tensors.items()}


def test_map_file_equals_safetensors_and_each_tensor_owns_its_bytes():
    """Mapped tensors have the values of the file, and storages of their own size."""
    for name in (RANK_0, "replicated.safetensors"):
        path = small_sets.converted("flux2", 2) / "tp2" / name
        found = map_file(path, FileHeader.read(path))
        assert_equal(found, path)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values())


def test_mapped_tensors_outlive_the_name_of_the_file(tmp_path):
    """The mapping holds the file: removing or replacing its name changes nothing that was loaded."""
    path = write(tmp_path / "x.safetensors", ours(4096))
    found = map_file(path, FileHeader.read(path))
    path.unlink()
    write(path, {"large": ("I32", (4,), b"\0" * 16)})
    assert found["large"].numpy().tobytes() == random_bytes(4 * 4096)


def test_writing_to_a_mapped_tensor_does_not_reach_the_file(tmp_path):
    """The mapping is private."""
    path = write(tmp_path / "x.safetensors", ours(4096))
    before = path.read_bytes()
    tensors = map_file(path, FileHeader.read(path))
    tensors["large"].zero_()
    assert not tensors["large"].any()
    assert path.read_bytes() == before


def test_one_allocation_holds_the_whole_file(tmp_path):
    """`read_file` makes one allocation for the data part, and every tensor is a view into it."""
    path = write(tmp_path / "x.safetensors", ours(4096))
    header = FileHeader.read(path)
    found = [tensor for tensor in read_file(path, header, CPU).values() if tensor.nbytes]
    assert {tensor.untyped_storage().data_ptr() for tensor in found} == {found[0].untyped_storage().data_ptr()}
    assert found[0].untyped_storage().nbytes() == header.file_nbytes - header.data_start


# --- what can go wrong ---


@pytest.mark.slow
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("left", [0, 1, 4096, 4097, 100_000, 400_000 + 22])
def test_e1_a_file_that_became_shorter_is_an_error(left, direct, tmp_path):
    """A file cut after its header was read gives an error with the place, not zeros (E1, J2)."""
    path = write(tmp_path / "x.safetensors", ours(100_000))
    header = FileHeader.read(path)
    os.truncate(path, header.data_start + left)
    with (
        mock.patch.object(transfer, "is_cached", return_value=not direct),
        pytest.raises(
            shardconv.SetError, match=r"^x.safetensors: ends at byte [\d,]+, its header promised more; fetch"
        ),
    ):
        read_file(path, header, CPU, 4 * KB)


Read = Callable[[int, list[memoryview], int], int]


def reading(read: Read) -> mock._patch[Read]:
    return mock.patch.object(os, "preadv", read)


@pytest.mark.parametrize(("most", "direct"), [(1, False), (100, False), (5000, False), (512, True), (4096, True)])
def test_short_reads_are_taken_up_where_they_ended(most, direct, tmp_path):
    """A read may give less than was asked for, as often as the system likes."""
    path = write(tmp_path / "x.safetensors", ours(3000))
    preadv, got = os.preadv, []

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        got.append(preadv(fd, [buffers[0][:most]], offset))
        return got[-1]

    with mock.patch.object(transfer, "is_cached", return_value=not direct), reading(short):
        found = read_file(path, FileHeader.read(path), CPU, 8 * KB)
    assert_equal(found, path)
    assert len(got) >= 12_000 / most


def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache(tmp_path):
    """Some systems take `O_DIRECT` at the opening and refuse the reads with EINVAL; the file is read all the same."""
    path = write(tmp_path / "x.safetensors", ours(100_000))
    preadv = os.preadv

    def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return preadv(fd, buffers, offset)

    with mock.patch.object(transfer, "is_cached", return_value=False), reading(refuse):
        found = read_file(path, FileHeader.read(path), CPU, 16 * KB)
    assert_equal(found, path)


def test_readers_that_meet_the_refusal_of_direct_reads_at_once(tmp_path):
    """A reader that is refused when another has just gone over to the cache for the same reason goes over as well."""
    path = write(tmp_path / "x.safetensors", ours(1000))
    preadv = os.preadv

    def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # what the other reader does
            raise OSError(22, "Invalid argument")
        return preadv(fd, buffers, offset)

    with mock.patch.object(transfer, "is_cached", return_value=False), reading(refuse):
        found = read_file(path, FileHeader.read(path), CPU, 16 * KB)
    assert_equal(found, path)


def test_an_invalid_read_through_the_cache_is_an_error(tmp_path):
    """EINVAL that has nothing to do with direct I/O is raised, not tried for ever."""
    path = write(tmp_path / "x.safetensors", ours(1000))
    with (
        mock.patch.object(transfer, "is_cached", return_value=True),
        reading(mock.Mock(side_effect=OSError(22, "Invalid argument"))),
        pytest.raises(OSError, match="Invalid argument"),
    ):
        read_file(path, FileHeader.read(path), CPU)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError(), KeyboardInterrupt()], ids=repr)
def test_a_failing_read_ends_all_readers_and_is_raised(error, after, tmp_path):
    """An error of one reader reaches the caller as it is; the others stop early and no thread is left."""
    path = write(tmp_path / "x.safetensors", ours(500_000))
    preadv, calls = os.preadv, []

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == after + 1:  # the others could go on
            raise error
        time.sleep(0.002)
        return preadv(fd, buffers, offset)

    with reading(failing), pytest.raises(type(error)) as caught:
        read_file(path, FileHeader.read(path), CPU, 4 * KB)
    assert caught.value is error
    assert len(calls) <= after + 4 * READERS  # of 489


def test_the_descriptor_is_closed_also_after_an_error(tmp_path):
    """No descriptor is left, whether the file was read or not."""
    path = write(tmp_path / "x.safetensors", ours(4096))
    header = FileHeader.read(path)
    before = set(os.listdir("/proc/self/fd"))
    read_file(path, header, CPU)
    with reading(mock.Mock(side_effect=OSError(5, "Input/output error"))), pytest.raises(OSError, match="Input/output"):
        read_file(path, header, CPU)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_every_chunk_is_read_once_by_several_readers(tmp_path):
    """Chunks are shared out among the readers, each byte is read once and starts where direct I/O wants it."""
    path = write(tmp_path / "x.safetensors", ours(100_000))
    header = FileHeader.read(path)
    preadv, calls, meeting = os.preadv, [], threading.Barrier(READERS, timeout=10)

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        first = threading.get_ident() not in {who for who, _ in calls}
        calls.append((threading.get_ident(), offset))
        if first:
            meeting.wait()  # as many readers as there are must be at work at once
        return preadv(fd, buffers, offset)

    with reading(slow):
        read_file(path, header, CPU, 16 * KB)
    offsets = sorted(offset for _, offset in calls)
    assert offsets == list(range(header.data_start, header.file_nbytes, 16 * KB))
    assert header.data_start % DATA_ALIGNMENT == 0
    assert len({who for who, _ in calls}) == READERS


# --- the page cache ---


def test_is_cached_tells_a_file_just_read_from_one_dropped(tmp_path):
    """A file just read is in the cache; after it was dropped the system knows; an empty one is."""
    path = write(tmp_path / "x.safetensors", ours(MB))
    path.read_bytes()
    assert is_cached(path)
    drop_from_cache(path)
    assert is_cached(path) is in_cache(path)
    (tmp_path / "empty").touch()
    assert is_cached(tmp_path / "empty")
