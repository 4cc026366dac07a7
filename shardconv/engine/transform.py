"""What happens to a chunk between reading and routing."""

from __future__ import annotations


def cast(data: memoryview, source: str, target: str) -> memoryview:
    """`data` as elements of `target`; the same bytes when nothing changes. Rounds to nearest even, as torch does."""
    if source == target or not data.nbytes:
        return data
    import torch

    from ..format.dtypes import torch_dtype

    tensor = torch.frombuffer(data, dtype=torch_dtype(source)).to(torch_dtype(target))
    return tensor.view(torch.uint8).numpy().data
