"""One small case for each class of the catalogue: a configuration of a few layers, and inputs for any configuration.

The tests and `shardconv check` compare sharded with unsharded models by them. Head counts are multiples of 4 where the
class allows, so that 2 and 4 ranks can share; widths differ from each other, so that a wrong dim cannot pass; optional
parts (image streams, masks, experts, gates) are switched on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import audio, flux, image, text, video, wan
from .draw import Case, Draw, Inputs

if TYPE_CHECKING:
    import torch
    from torch import nn

CASES: Mapping[str, Case] = {**wan.CASES, **video.CASES, **flux.CASES, **image.CASES, **audio.CASES, **text.CASES}


def build(name: str, config: Mapping[str, Any] | None = None, seed: int = 0) -> Any:
    """A float32 model of the class `name` in eval mode, random weights of `seed`; `config` None: the small case's."""
    import torch

    from ....libraries.choose import library_of, model_class
    from .. import small_models

    cls = model_class(name)
    model = library_of(cls).build(cls, CASES[name].config if config is None else config)
    model = model.to(torch.float32)
    small_models.randomize(model, seed)
    return model.eval()


def inputs(model: nn.Module, seed: int = 1) -> Inputs:
    """Keyword arguments for a call of `model`, whose class has a case."""
    return CASES[type(model).__name__].inputs(model.config, Draw(seed))


def outputs(model: nn.Module, given: Inputs) -> list[torch.Tensor]:
    """Every tensor that a call gives, in order."""
    import torch

    with torch.inference_mode():
        return list(_tensors(model(**given, return_dict=False)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
