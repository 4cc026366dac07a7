"""Names of dtypes in the safetensors format: how many bits an element has, and which dtype of torch that is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    import torch

# Bits for one element, by the names of the format.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
REAL_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})  # that a model computes in
SMALL_FLOATS = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})  # to store; F8_E8M0 is for scales
CAST_FLOATS = REAL_FLOATS | SMALL_FLOATS  # what a dtype cast touches

_OF_TORCH: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of `dtype` (a name of the format) and `shape`; whole bytes even for 4- and 6-bit elements."""
    return (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8


def format_name(dtype: torch.dtype) -> str:
    """The name that the format has for a dtype of torch; "" for one that it has not."""
    return next((name for name, known in _OF_TORCH.items() if str(dtype) == f"torch.{known}"), "")


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for a name of the format. Raises `UsageError` when this torch has none."""
    import torch

    dtype = getattr(torch, _OF_TORCH.get(name, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{name}: torch {torch.__version__} has no such dtype; use a newer torch")
    return dtype
