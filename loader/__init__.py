"""Run a pre-sharded diffusers model: each rank takes its own file and its modules get the matching collectives.

    model = loader.load_model("out/transformer")              # inside torchrun
    pipe = loader.load_pipeline("out", dtype=torch.bfloat16)
    model = loader.parallelize(model)                         # a model already in memory

Importing this package imports neither torch nor diffusers; that happens at the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .files.readahead import prefetch

if TYPE_CHECKING:
    from .inputs import check_inputs as check_inputs
    from .load import load_model as load_model
    from .parallel import parallelize as parallelize
    from .pipeline import load_pipeline as load_pipeline

__all__ = ["check_inputs", "load_model", "load_pipeline", "parallelize", "prefetch"]

_HOME = {"check_inputs": "inputs", "load_model": "load", "load_pipeline": "pipeline", "parallelize": "parallel"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'loader' has no attribute {name!r}")
    from importlib import import_module

    from shardconv.libraries.base import BUILDING

    with BUILDING:  # two threads that ask for the first time
        return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
