"""Pinned buffers between a file and an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardconv.format.header import DATA_ALIGNMENT

from .chunks import Read, read_chunk


@contextmanager
def through_ring(fd: int, path: Path, data_start: int, data: torch.Tensor, chunk: int) -> Iterator[Read]:
    ring = _Ring(data.device, chunk)

    def read(start: int, end: int) -> None:
        slot = ring.free_slot()
        read_chunk(fd, path, ring.bytes_of(slot), end - start, data_start + start)
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
