"""What is known of model classes beyond diffusers' own `_tp_plan`s: plans, and what attention code needs to be changed.

Data, one entry a class, each proved by a test that compares two sharded ranks with the unsharded model. Nothing is
ever guessed from attribute names at run time: PixArt, Latte, Allegro, Sana and SD3 run without any error when a head
count is wrong, and return wrong numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .entries import ENTRIES
from .entry import Entry, expand

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ENTRIES", "Entry", "entry_of", "expand"]


def entry_of(model: nn.Module) -> Entry | None:
    """The entry of the model's class; None for a class that is not listed."""
    return ENTRIES.get(type(model).__name__)
