"""Inputs for one forward of a FLUX or FLUX.2 transformer of any width, the same on every rank."""

from __future__ import annotations

from typing import Any

import torch

NR_SAMPLES = 64  # output values by which two runs are compared


def inputs(config: Any, dtype: torch.dtype, image: int = 16, text: int = 16, seed: int = 1) -> dict[str, Any]:
    """Keyword arguments for `model(**inputs)`, a batch of one; `image` (a square) and `text` in tokens."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator).to(dtype)

    axes = len(config.axes_dims_rope)
    side = round(image**0.5)
    ids = torch.zeros(side, side, axes)
    ids[..., 1], ids[..., 2] = torch.arange(side)[:, None], torch.arange(side)[None, :]
    given: dict[str, Any] = {
        "hidden_states": noise(side * side, config.in_channels),
        "encoder_hidden_states": noise(text, config.joint_attention_dim),
        "timestep": torch.tensor([0.5]).to(dtype),
        "guidance": torch.tensor([3.5]).to(dtype),
        "img_ids": ids.reshape(-1, axes),
        "txt_ids": torch.zeros(text, axes),
    }
    if "pooled_projection_dim" in config:
        given["pooled_projections"] = noise(config.pooled_projection_dim)
    return given


def samples(output: torch.Tensor) -> list[float]:
    """A few values spread over `output`."""
    flat = output.detach().float().reshape(-1)
    step = max(1, flat.numel() // NR_SAMPLES)
    return [float(value) for value in flat[::step][:NR_SAMPLES]]


def difference(mine: list[float], theirs: list[float]) -> float:
    """Largest difference, as a share of the largest value."""
    return max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) / max(map(abs, theirs))
