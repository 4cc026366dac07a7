"""dtype names of the safetensors format and torch's dtypes. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import UsageError

_NAMES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for a name of the format. Raises `UsageError` when this torch has none."""
    dtype = getattr(torch, _NAMES.get(name, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{name}: torch {torch.__version__} has no such dtype; use a newer torch")
    return dtype
