"""What happens to a chunk between reading and routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Transform(Protocol):
    """One step on the elements of a tensor, as many out as in, in the same order."""

    @property
    def reads(self) -> str:
        """The dtype of what comes in, a name of the safetensors format."""

    @property
    def gives(self) -> str:
        """The dtype of what goes out."""

    def __call__(self, data: memoryview) -> memoryview:
        """The step on whole elements; what it gives is valid as long as `data` is."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounds to nearest even, as torch does; the same bytes where nothing changes."""

    reads: str
    gives: str

    def __call__(self, data: memoryview) -> memoryview:
        """`data` as elements of the dtype `gives`."""
        if self.reads == self.gives or not data.nbytes:
            return data
        import torch

        from ..format.dtypes import torch_dtype

        tensor = torch.frombuffer(data, dtype=torch_dtype(self.reads)).to(torch_dtype(self.gives))
        return tensor.view(torch.uint8).numpy().data
