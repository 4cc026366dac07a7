"""What a case is made of, and inputs that several classes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Config = Any  # a model's config: attributes by name
Inputs = dict[str, Any]


class Draw:
    """Random inputs, the same for the same seed on every rank."""

    def __init__(self, seed: int) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """float32, N(0, 1)."""
        import torch

        return torch.randn(shape, generator=self._generator)

    def below(self, high: int, *shape: int) -> torch.Tensor:
        """int64, 0 to `high` - 1."""
        import torch

        return torch.randint(high, shape, generator=self._generator)


@dataclass(frozen=True, slots=True)
class Case:
    """How to build and to call a small model of one class."""

    config: Mapping[str, Any]
    inputs: Callable[[Config, Draw], Inputs]


def values(*numbers: float) -> torch.Tensor:
    """A float32 vector."""
    import torch

    return torch.tensor(numbers, dtype=torch.float32)


def text_mask(tokens: int, batch: int = 1, left_out: int = 2, dtype: str = "bool") -> torch.Tensor:
    """`[batch, tokens]`: which count; the last `left_out` of the last sample do not."""
    import torch

    mask = torch.ones(batch, tokens, dtype=getattr(torch, dtype))
    if left_out:
        mask[-1, -left_out:] = 0
    return mask


def grid_ids(axes: int, height: int = 4, width: int = 4) -> torch.Tensor:
    """`[height * width, axes]`: row and column of each token on axes 1 and 2."""
    import torch

    ids = torch.zeros(height, width, axes)
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)[None, :]
    return ids.reshape(height * width, axes)


def zeros(*shape: int) -> torch.Tensor:
    """float32."""
    import torch

    return torch.zeros(shape)


def arange(stop: int, start: int = 0) -> torch.Tensor:
    """int64."""
    import torch

    return torch.arange(start, stop)
