"""Which runtime layer stands in for which layer of a model, style by style."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardconv.format.plan import Style
from shardconv.plans.match import PlannedModule

from ..group.ranks import Ranks
from . import embedding, linear

Maker = Callable[[Any, PlannedModule, Ranks], None]


def makers(style: Style) -> Mapping[type, Maker]:
    """Class of a layer -> what turns such a layer, in place, into the runtime one of `style`. No other class may be cut
    so: its forward is not known."""
    known: Mapping[Style, Mapping[type, Maker]] = {**linear.MAKERS, **embedding.MAKERS}
    if style in known:
        return known[style]
    from . import norms  # late, as it imports diffusers: that takes seconds in which files are read

    return norms.MAKERS.get(style, {})
