"""Files mapped into memory."""

from __future__ import annotations

import errno
import mmap
import warnings
from pathlib import Path

import torch

from shardconv.errors import ShardconvWarning
from shardconv.format.dtypes import torch_dtype
from shardconv.format.header import FileHeader, TensorEntry


def map_file(path: Path, header: FileHeader) -> dict[str, torch.Tensor]:
    """Tensors of `path` that share its mapping. Nothing is read yet.

    The mapping is private: writing to a tensor changes neither the file nor another process. Each tensor has a storage
    of exactly its own bytes. A file that someone shortens while it is mapped kills the process on access (SIGBUS).

    Where the system counts such a mapping as memory and has none left (strict overcommit), the tensors are read-only,
    with a `ShardconvWarning`: writing to one then kills the process.
    """
    if header.file_nbytes == header.data_start:
        return views_of(None, header)
    with open(path, "rb") as file:
        try:
            return views_of(_map_private(file.fileno(), header.file_nbytes, mmap.PROT_READ | mmap.PROT_WRITE), header)
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
        return views_of(mapping, header)


def _map_private(fd: int, nbytes: int, access: int) -> mmap.mmap:
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0), prot=access)


def views_of(memory: mmap.mmap | None, header: FileHeader) -> dict[str, torch.Tensor]:
    """The tensors of a file whose bytes stand in `memory` as they do in the file; they keep it alive."""
    return {entry.name: _view(memory, header, entry) for entry in header.tensors}


def _view(memory: mmap.mmap | None, header: FileHeader, entry: TensorEntry) -> torch.Tensor:
    dtype = torch_dtype(entry.dtype)
    if memory is None or entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    offset = header.data_start + entry.start
    count = entry.nbytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(entry.shape)
