"""One rank's tensors out of several rank files, for a set whose tp degree is a multiple of the group's.

Rank r of n takes, of a set of degree k * n, the slices of ranks r * k to r * k + k - 1: of every block of the cut dim
their parts, one after the other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import torch

from shardconv.errors import SetError
from shardconv.format.cut import Cut
from shardconv.format.dtypes import torch_dtype
from shardconv.format.header import TensorEntry
from shardconv.format.sets import SetFile
from shardconv.system.crew import Crew, check_stop

from .chunks import CHUNK_NBYTES, READERS


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch along the cut dim that one slice gives to the joined tensor. In elements of that dim."""

    start: int  # in the slice
    joined_start: int
    length: int


def parts(sliced_blocks: Sequence[int], position: int, num_slices: int) -> Iterator[Part]:
    """What the slice at `position` of `num_slices` gives, block by block; `sliced_blocks`: the sizes in one slice."""
    start = 0
    for length in sliced_blocks:
        yield Part(start, start * num_slices + position * length, length)
        start += length


def join(
    files: Sequence[SetFile], degree: int, cuts: Mapping[str, Cut | None], device: torch.device
) -> dict[str, torch.Tensor]:
    """The tensors that `files`, those of consecutive ranks of a set of `degree`, make together, on `device`.

    `cuts` has every tensor of the files; one that is not cut is taken from the first. Tensors are made one after the
    other, so that there is the result and no more than one tensor of it, in host memory and on an accelerator each.

    Raises `SetError` when a file is shorter than its header said, `OSError` when the system refuses a read, `Stopped`
    as `check_stop` does.
    """
    tensors = {}
    largest = max((entry.nbytes for entry in files[0].header.tensors), default=0)
    with ExitStack() as stack:
        opened = [stack.enter_context(open(file.path, "rb", buffering=0)) for file in files]
        crew = stack.enter_context(Crew(min(len(files), READERS), "loader-join"))
        buffers = [torch.empty(largest, dtype=torch.uint8, pin_memory=device.type != "cpu") for _ in files]
        for entries in zip(*(file.header.tensors for file in files), strict=True):
            cut = cuts[entries[0].name]
            slices = [
                _Slice(raw, file.header.data_start + entry.start, entry, buffer)
                for raw, file, entry, buffer in zip(opened, files, entries, buffers, strict=True)
            ]
            if cut is None:
                tensors[entries[0].name] = slices[0].copy_on(device)
            else:
                blocks = [size // degree for size in cut.block_sizes]
                tensors[entries[0].name] = _join(slices, cut.dim, blocks, device, crew)
    return tensors


@dataclass(frozen=True, slots=True)
class _Slice:
    """What one file holds of a tensor."""

    file: BinaryIO
    offset: int  # absolute byte offset
    entry: TensorEntry
    buffer: torch.Tensor  # host memory to read it into, with room for any slice of the file; bytes

    def read(self) -> torch.Tensor:
        """All of it, in the buffer."""
        tensor = self.buffer[: self.entry.nbytes].view(torch_dtype(self.entry.dtype)).view(self.entry.shape)
        self.read_into(tensor, 0)
        return tensor

    def copy_on(self, device: torch.device) -> torch.Tensor:
        """All of it, in memory of its own."""
        if device.type != "cpu":
            return self.read().to(device)
        tensor = torch.empty(self.entry.shape, dtype=torch_dtype(self.entry.dtype))
        self.read_into(tensor, 0)
        return tensor

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill `target`, contiguous and in host memory, from the byte `start` of the slice."""
        left = target.reshape(-1).view(torch.uint8).numpy().data
        offset = self.offset + start
        while left:
            check_stop()
            got = os.preadv(self.file.fileno(), [left[:CHUNK_NBYTES]], offset)
            if got == 0:
                name = os.path.basename(self.file.name)
                raise SetError(f"{name}: ends at byte {offset:,}, its header promised more; fetch it again")
            left, offset = left[got:], offset + got


def _join(slices: Sequence[_Slice], dim: int, blocks: Sequence[int], device: torch.device, crew: Crew) -> torch.Tensor:
    """The tensor of which every slice holds `blocks` along `dim`, the slices read side by side."""
    entry = slices[0].entry
    shape = [num * len(slices) if each == dim else num for each, num in enumerate(entry.shape)]
    joined = torch.empty(shape, dtype=torch_dtype(entry.dtype), device=device)
    # Along the outermost dim a part is one stretch of memory, which the file can be read into.
    in_place = device.type == "cpu" and math.prod(shape[:dim]) == 1
    step_nbytes = math.prod(shape[dim + 1 :]) * joined.itemsize

    def place(position: int) -> None:
        held = None if in_place else slices[position].read().to(device)
        for part in parts(blocks, position, len(slices)):
            target = joined.narrow(dim, part.joined_start, part.length)
            if held is None:
                slices[position].read_into(target, part.start * step_nbytes)
            else:
                target.copy_(held.narrow(dim, part.start, part.length))

    crew.results([crew.submit(partial(place, position)) for position in range(len(slices))])
    return joined
