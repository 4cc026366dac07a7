"""Bytes of a set's file to tensors on a device.

CPU: the file is mapped, tensors are views into the mapping, pages come in when used; or it is read into plain memory.
Accelerators: one device allocation a file, several reader threads, each with two pinned buffers and a stream of its
own; `preadv` releases the interpreter lock, so disk and bus are busy together and host memory stays at the buffers. A
file that is in the page cache is read through it, a cold one past it (direct I/O).
"""

from __future__ import annotations

import mmap
from contextlib import nullcontext
from pathlib import Path

import torch

from shardconv.format.dtypes import torch_dtype
from shardconv.format.header import DATA_ALIGNMENT, FileHeader, TensorEntry
from shardconv.system.pagecache import is_cached

from .chunks import CHUNK_NBYTES, opened, read_chunk, share_out
from .mapping import views_of
from .ring import through_ring


def read_into_memory(path: Path, header: FileHeader) -> dict[str, torch.Tensor]:
    """Tensors of `path` in plain memory, each with a storage of its own bytes; all is read when this returns.

    Raises as `read_file`. Nothing that happens to the file later reaches the tensors.
    """
    if header.file_nbytes == header.data_start:
        return views_of(None, header)
    memory = mmap.mmap(-1, header.file_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # a fault every 2 MiB instead of every 4 KiB
    with opened(path, direct=False) as fd, memoryview(memory)[header.data_start :] as data:

        def read(start: int, end: int) -> None:
            read_chunk(fd, path, data[start:end], end - start, header.data_start + start)

        share_out(len(data), CHUNK_NBYTES, lambda: nullcontext(read))
    return views_of(memory, header)


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
    with opened(path, direct) as fd:
        share_out(nbytes, chunk, lambda: through_ring(fd, path, header.data_start, data, chunk))
    return {entry.name: _typed(data[entry.start : entry.end], entry) for entry in header.tensors}


def _typed(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Bytes as the tensor of `entry`: a view, or a copy where they do not start on a whole element."""
    dtype = torch_dtype(entry.dtype)
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(entry.shape)
