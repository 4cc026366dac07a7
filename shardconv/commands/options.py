"""What a person may choose about a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..format.plan import OWN, PlanChoice

DTYPES: Mapping[str, str] = {
    "bf16": "BF16", "bfloat16": "BF16", "fp16": "F16", "float16": "F16", "fp32": "F32", "float32": "F32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """What a person may choose about a conversion."""

    tp: int
    variant: str | None = None
    dtype: str | None = None  # a key of DTYPES
    plan: PlanChoice = OWN
    self_contained: bool = False
    overwrite: bool = False
    dry_run: bool = False
    low_disk: bool = False
    only: tuple[str, ...] = ()  # components of a pipeline to shard, whatever they save; none: those that pay
    whole: tuple[str, ...] = ()  # components of a pipeline to leave as they are
