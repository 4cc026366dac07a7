"""Sources and converted sets of the small models, each made once in a test run. Copy before damaging one."""

from __future__ import annotations

import atexit
import functools
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from small_minimax import MINIMAX_PLAN, build_minimax, minimax_inputs

import shardconv
from shardconv.plans.catalogue import small_models
from shardconv.plans.choice import has_plan


def planned(*names: str) -> tuple[str, ...]:
    """Those of the small models `names` whose class has a plan: diffusers 0.41 gives qwenimage21 none yet."""
    return tuple(name for name in names if has_plan("diffusers", small_models.class_name(name)))


NAMES = (*planned(*small_models.NAMES), "minimax")
PLANS: Mapping[str, Mapping[str, object]] = {"minimax": MINIMAX_PLAN}  # of classes that carry none


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="shardconv-sets-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def build(name: str) -> Any:
    """The unsharded model."""
    return build_minimax() if name == "minimax" else small_models.build(name)


def inputs(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Keyword arguments of a forward pass, floating point ones in `dtype`."""
    given = minimax_inputs() if name == "minimax" else small_models.inputs(name)
    return {
        key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in given.items()
    }


def outputs(model: Any, name: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Every output of one forward pass."""
    with torch.inference_mode():
        return list(model(**inputs(name, dtype), return_dict=False))


@functools.cache
def source(name: str) -> Path:
    """The small model as diffusers saves it."""
    folder = _folder() / name
    build(name).save_pretrained(folder)
    return folder


@functools.cache
def converted(name: str, tp: int, **options: Any) -> Path:
    """The component folder that `shardconv.convert` wrote for `tp` ranks."""
    out = _folder() / "-".join([name, f"tp{tp}", *map(str, options.values())])
    shardconv.convert(source(name), out, tp=tp, plan=PLANS.get(name), **options)
    return out


def copied(component: Path, target: Path) -> Path:
    """A copy of a converted component folder, to damage."""
    return Path(shutil.copytree(component, target))


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest difference, relative to the largest output, over all outputs; infinite when one is not a number."""
    assert [each.shape for each in found] == [each.shape for each in expected]
    worst = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(found, expected, strict=True)
    ]
    return max(math.inf if math.isnan(each) else each for each in worst)
