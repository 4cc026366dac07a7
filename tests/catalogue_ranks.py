"""What the ranks of the catalogue's tests run. Importing this imports every class once, for all forked ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import small_sets
import torch
import torch.distributed as dist

import loader
from loader import fixups, linear, parallel
from shardconv.catalogue import cases
from shardconv.errors import LoadError
from shardconv.plan import Plan

for _name in cases.CASES:
    getattr(diffusers, _name)


def load_and_compare(out: Path, expected: list[torch.Tensor]) -> float:
    """The largest difference between the loaded model's outputs and the unsharded one's, of the largest output."""
    model = loader.load_model(out, device="cpu")
    return small_sets.difference(cases.outputs(model, cases.inputs(model)), expected)


def compare(name: str, config: Mapping[str, Any], plan: Plan | None = None, dtype: torch.dtype | None = None) -> float:
    """Likewise for a model sharded in memory under `plan`."""
    whole = cases.build(name, config).to(dtype)
    expected = cases.outputs(whole, _cast(cases.inputs(whole), dtype))
    model = loader.parallelize(cases.build(name, config).to(dtype), plan=plan)
    return small_sets.difference(cases.outputs(model, _cast(cases.inputs(model), dtype)), expected)


def _cast(given: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(given, torch.Tensor) and dtype is not None and given.dtype == torch.float32:
        return given.to(dtype)
    if isinstance(given, dict):
        return {key: _cast(value, dtype) for key, value in given.items()}
    return type(given)(_cast(item, dtype) for item in given) if isinstance(given, (list, tuple)) else given


def compare_without(name: str, fault: str, config: Mapping[str, Any] | None = None) -> float | str:
    """The difference when one fix-up is left out, or the error that it ends with."""
    with FAULTS[fault]():
        try:
            return compare(name, cases.CASES[name].config | (config or {}))
        except (RuntimeError, LoadError) as error:
            return type(error).__name__


def _nothing(name: str) -> Any:
    return lambda: mock.patch.object(parallel, name)


def _local_statistics() -> Any:
    """Norms take the mean over the features of their own rank."""

    def keep(norm: Any, features: int, group_name: str) -> None:
        norm.normalized_shape = (features // dist.get_world_size(),)

    return mock.patch.object(parallel, "make_local_norm", keep)


def _first_table() -> Any:
    """Every rank takes the first part of a rope table."""

    class First(fixups._RopeSlicer):
        def __init__(self, arguments: Any, ranks: Any) -> None:
            super().__init__(arguments, ranks)
            self._rank = 0

    return mock.patch.object(fixups, "_RopeSlicer", First)


def _local_convolution() -> Any:
    return mock.patch.object(linear.RowwiseConv2d, "forward", torch.nn.Conv2d.forward)


FAULTS = {
    "none": contextlib.nullcontext,
    "heads left whole": _nothing("make_counts_local"),
    "norm left local": _local_statistics,
    "rope left whole": _nothing("slice_ropes"),
    "rope of rank 0": _first_table,
    "experts not summed": _nothing("sum_outputs"),
    "convolution not summed": _local_convolution,
}
