"""Bytes of a set's file to tensors on a device.

CPU: the file is mapped, tensors are views into the mapping, pages come in when used; or it is read into plain memory.
Accelerators: one device allocation a file, several reader threads, each with two pinned buffers and a stream of its
own; `preadv` releases the interpreter lock, so disk and bus are busy together and host memory stays at the buffers. A
file that is in the page cache is read through it, a cold one past it (direct I/O).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from shardconv.errors import SetError, ShardconvWarning
from shardconv.format.dtypes import torch_dtype
from shardconv.format.header import DATA_ALIGNMENT, FileHeader, TensorEntry
from shardconv.system.crew import Crew, check_stop
from shardconv.system.pagecache import is_cached

# One thread copies 5 to 10 GB/s out of the page cache, so a bus of 50 GB/s wants eight; they pin 128 MiB together, no
# more than four with chunks twice as long, and pinning costs time.
CHUNK_NBYTES = 8 << 20  # bytes read and copied at once
READERS = 8  # threads; host memory is READERS times two chunks

Read = Callable[[int, int], None]  # reads from a start to an exclusive end, bytes from the start of the data part


def map_file(path: Path, header: FileHeader) -> dict[str, torch.Tensor]:
    """Tensors of `path` that share its mapping. Nothing is read yet.

    The mapping is private: writing to a tensor changes neither the file nor another process. Each tensor has a storage
    of exactly its own bytes. A file that someone shortens while it is mapped kills the process on access (SIGBUS).

    Where the system counts such a mapping as memory and has none left (strict overcommit), the tensors are read-only,
    with a `ShardconvWarning`: writing to one then kills the process.
    """
    if header.file_nbytes == header.data_start:
        return _views(None, header)
    with open(path, "rb") as file:
        try:
            return _views(_map_private(file.fileno(), header.file_nbytes, mmap.PROT_READ | mmap.PROT_WRITE), header)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
        mapping = _map_private(file.fileno(), header.file_nbytes, mmap.PROT_READ)
    warnings.warn(
        f"{path.name}: the system reserves no memory for changes to it, so its tensors are read-only; writing to one "
        "in place would end the process",
        ShardconvWarning,
        stacklevel=2,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return _views(mapping, header)


def _map_private(fd: int, nbytes: int, access: int) -> mmap.mmap:
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0), prot=access)


def _views(memory: mmap.mmap | None, header: FileHeader) -> dict[str, torch.Tensor]:
    """The tensors of a file whose bytes stand in `memory` as they do in the file; they keep it alive."""
    return {entry.name: _view(memory, header, entry) for entry in header.tensors}


def _view(memory: mmap.mmap | None, header: FileHeader, entry: TensorEntry) -> torch.Tensor:
    dtype = torch_dtype(entry.dtype)
    if memory is None or entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    offset = header.data_start + entry.start
    count = entry.nbytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(entry.shape)


def read_into_memory(path: Path, header: FileHeader) -> dict[str, torch.Tensor]:
    """Tensors of `path` in plain memory, each with a storage of its own bytes; all is read when this returns.

    Raises as `read_file`. Nothing that happens to the file later reaches the tensors.
    """
    if header.file_nbytes == header.data_start:
        return _views(None, header)
    memory = mmap.mmap(-1, header.file_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # a fault every 2 MiB instead of every 4 KiB
    with _opened(path, direct=False) as fd, memoryview(memory)[header.data_start :] as data:

        def read(start: int, end: int) -> None:
            _read_chunk(fd, path, data[start:end], end - start, header.data_start + start)

        _share_out(len(data), CHUNK_NBYTES, lambda: nullcontext(read))
    return _views(memory, header)


def read_file(
    path: Path, header: FileHeader, device: torch.device, chunk: int = CHUNK_NBYTES
) -> dict[str, torch.Tensor]:
    """Tensors of `path` on `device`, views into one allocation there; every byte is read when this returns.

    `chunk` is in bytes, a multiple of 4096. Raises `SetError` when the file is shorter than its header said, `OSError`
    when the system refuses a read, `Stopped` as `check_stop` does; no thread is left behind.
    """
    nbytes = header.file_nbytes - header.data_start
    data = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # the allocation may be memory that queued kernels still use
    direct = header.data_start % DATA_ALIGNMENT == 0 and not is_cached(path)
    with _opened(path, direct) as fd:
        _share_out(nbytes, chunk, lambda: _through_ring(fd, path, header.data_start, data, chunk))
    return {entry.name: _typed(data[entry.start : entry.end], entry) for entry in header.tensors}


def _typed(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Bytes as the tensor of `entry`: a view, or a copy where they do not start on a whole element."""
    dtype = torch_dtype(entry.dtype)
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(entry.shape)


@contextmanager
def _opened(path: Path, direct: bool) -> Iterator[int]:
    fd = -1
    if direct:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the file system has no direct I/O
                raise
    if fd < 0:
        fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _share_out(nbytes: int, chunk: int, reading: Callable[[], AbstractContextManager[Read]]) -> None:
    """Have READERS threads, each inside a `reading()` of its own, read `nbytes` from the front, chunk by chunk."""
    starts = iter(range(0, nbytes, chunk))
    lock = threading.Lock()

    def read_some() -> None:
        with reading() as read:
            while True:
                check_stop()
                with lock:
                    start = next(starts, None)
                if start is None:
                    break
                read(start, min(start + chunk, nbytes))

    nr = min(READERS, max(1, -(-nbytes // chunk)))
    with Crew(nr, "shardconv-read") as crew:
        crew.results([crew.submit(read_some) for _ in range(nr)])


def _read_chunk(fd: int, path: Path, buffer: memoryview, nbytes: int, offset: int) -> None:
    """Read `nbytes` at `offset`; asks for whole pages, as direct I/O wants, and may get less at the end of the file."""
    done = 0
    asked = min(len(buffer), -(-nbytes // DATA_ALIGNMENT) * DATA_ALIGNMENT)
    while done < nbytes:
        check_stop()
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)  # before the read: another reader may meet the same refusal meanwhile
        try:
            got = os.preadv(fd, [buffer[done:asked]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # Some file systems take O_DIRECT and refuse the reads; and after a short read the rest is not aligned.
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if got == 0:
            raise SetError(f"{path.name}: ends at byte {offset + done:,}, its header promised more; fetch it again")
        done += got


@contextmanager
def _through_ring(fd: int, path: Path, data_start: int, data: torch.Tensor, chunk: int) -> Iterator[Read]:
    ring = _Ring(data.device, chunk)

    def read(start: int, end: int) -> None:
        slot = ring.free_slot()
        _read_chunk(fd, path, ring.bytes_of(slot), end - start, data_start + start)
        ring.send(slot, data[start:end])

    try:
        yield read
    finally:
        ring.drain()


class _Ring:
    """Two host buffers of one reader thread, and the stream by which they reach the device."""

    def __init__(self, device: torch.device, chunk: int) -> None:
        pinned = device.type != "cpu"
        if pinned:  # starts on a page, as direct I/O wants; torch pins the next power of two, so not a byte more
            self._slots = [torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        else:
            raw = [torch.empty(chunk + DATA_ALIGNMENT, dtype=torch.uint8) for _ in range(2)]
            self._slots = [tensor[-tensor.data_ptr() % DATA_ALIGNMENT :][:chunk] for tensor in raw]
        self._stream = torch.Stream(device) if pinned else None
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)  # of this reader thread, which ends with the transfer
        self._sent: list[torch.Event | None] = [None, None]
        self._next = 0

    def free_slot(self) -> int:
        """A slot whose last copy has arrived."""
        slot, self._next = self._next, 1 - self._next
        event = self._sent[slot]
        if event is not None:
            event.synchronize()
        return slot

    def bytes_of(self, slot: int) -> memoryview:
        """The host memory of a slot, to read into."""
        return self._slots[slot].numpy().data

    def send(self, slot: int, target: torch.Tensor) -> None:
        """Start copying a slot to `target`."""
        filled = self._slots[slot][: target.nbytes]
        if self._stream is None:
            target.copy_(filled)
            return
        target.copy_(filled, non_blocking=True)
        self._sent[slot] = self._stream.record_event()

    def drain(self) -> None:
        """Wait until everything sent has arrived, so that buffers may go."""
        if self._stream is not None:
            self._stream.synchronize()
