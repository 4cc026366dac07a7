"""Run a pre-sharded diffusers model: each rank takes its own file and its modules get the matching collectives.

    model = loader.load_model("out/transformer")              # inside torchrun
    pipe = loader.load_pipeline("out", dtype=torch.bfloat16)
    model = loader.parallelize(model)                         # a model already in memory

Importing this package imports neither torch nor diffusers; that happens at the first call.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing`'s own takes longer to import than all that stands here
if TYPE_CHECKING:
    from typing import Any

    from .files.readahead import prefetch as prefetch
    from .inputs import check_inputs as check_inputs
    from .load import load_model as load_model
    from .parallel import parallelize as parallelize
    from .pipeline import load_pipeline as load_pipeline

__all__ = ["check_inputs", "load_model", "load_pipeline", "parallelize", "prefetch"]

_HOME = {
    "check_inputs": "inputs",
    "load_model": "load",
    "load_pipeline": "pipeline",
    "parallelize": "parallel",
    "prefetch": "files.readahead",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'loader' has no attribute {name!r}")
    from importlib import import_module

    if name == "prefetch":  # the standard library alone, at once
        return import_module(".files.readahead", __name__).prefetch
    from shardconv.libraries.base import BUILDING

    with BUILDING:  # two threads that ask for the first time
        return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
