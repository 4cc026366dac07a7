"""Plans as data: module pattern -> rule. Nothing here looks at a model.

A plan comes from a model class (`_tp_plan`: diffusers' strings and its `PackedColwiseParallel` and
`PackedRowwiseParallel` objects) or from a JSON file:

    {"blocks.*.attn.to_q": "colwise", "blocks.*.ff.proj": {"style": "packed_colwise", "blocks": [1, 1]}}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal

from ..errors import PlanError, UsageError
from ..system.jsonfile import parse


class Style(str, Enum):
    """How one layer (a `Linear` has the weight `[out, in]`) is cut; `STYLES` says what each means."""

    COLWISE = "colwise"
    ROWWISE = "rowwise"
    ROWWISE_SPLIT_INPUT = "rowwise_split_input"
    PACKED_COLWISE = "packed_colwise"
    PACKED_ROWWISE = "packed_rowwise"
    NORM_ACROSS_HEADS = "norm_across_heads"
    VOCABULARY = "vocabulary"
    PARAMETER = "parameter"

    @property
    def dim(self) -> int:
        """The dim of the weight that is cut; a `PARAMETER` is cut along the dim that its rule gives."""
        return STYLES[self].dim

    @property
    def is_colwise(self) -> bool:
        """Whether it is a layer of a matrix product whose output stays sharded."""
        return STYLES[self].input == "whole" and STYLES[self].output == "local"

    @property
    def is_packed(self) -> bool:
        """Whether each of several blocks is cut on its own."""
        return STYLES[self].is_packed

    @property
    def is_whole_around(self) -> bool:
        """Whether what comes in and what goes out is whole, so that nothing around the layer can notice the cut."""
        return STYLES[self].input in ("whole", "split") and STYLES[self].output == "summed"

    @property
    def takes_local_input(self) -> bool:
        """Whether a layer's input arrives already sharded, as the output of a colwise `Linear` does, and its output is
        whole."""
        return STYLES[self].input == "local" and STYLES[self].output == "summed"


@dataclass(frozen=True, slots=True)
class Meaning:
    """A row of the table of styles."""

    dim: int  # of the weight that is cut
    input: Literal["whole", "local", "split", "none"]  # split: arrives whole, each rank takes its part
    output: Literal["local", "summed", "none"]
    layers: str  # which can be cut so, for people
    is_packed: bool = False


_PRODUCTS = "nn.Linear, nn.Conv2d"
STYLES: Mapping[Style, Meaning] = {
    Style.COLWISE: Meaning(0, "whole", "local", _PRODUCTS),
    Style.ROWWISE: Meaning(1, "local", "summed", _PRODUCTS),
    Style.ROWWISE_SPLIT_INPUT: Meaning(1, "split", "summed", "nn.Linear"),
    Style.PACKED_COLWISE: Meaning(0, "whole", "local", _PRODUCTS, is_packed=True),
    Style.PACKED_ROWWISE: Meaning(1, "local", "summed", _PRODUCTS, is_packed=True),
    # A norm over a sharded dim: weight and bias are cut, its statistics summed over the ranks.
    Style.NORM_ACROSS_HEADS: Meaning(0, "local", "local", "norms over all heads"),
    # Each rank looks up the ids whose rows it holds and gives zeros for the others: the sum is exact.
    Style.VOCABULARY: Meaning(0, "whole", "summed", "nn.Embedding"),
    # A tensor that a module holds outside any layer: one value a head, the weights of experts.
    Style.PARAMETER: Meaning(0, "none", "none", "bare parameters and buffers"),
}

# Names other projects use for one of our styles (transformers: rowwise_rep takes a replicated input).
ALIASES: Mapping[str, Style] = {"rowwise_rep": Style.ROWWISE_SPLIT_INPUT}
REPLICATED = "replicated"  # the word for a tensor that no rule cuts

_PACKED_OBJECTS = {"PackedColwiseParallel": Style.PACKED_COLWISE, "PackedRowwiseParallel": Style.PACKED_ROWWISE}


@dataclass(frozen=True, slots=True)
class Rule:
    """The style of a pattern; `blocks` are proportions, None when the `Linear` itself carries the block sizes.

    Absolute block sizes are proportions too: their sum is the dim.
    """

    style: Style
    blocks: tuple[int, ...] | None = None
    dim: int | None = None  # of a `PARAMETER`


Plan = Mapping[str, Rule]


def parse_plan(raw: object, where: str) -> Plan:
    """A plan from what a class or a JSON file holds; `where` names its origin in messages.

    Raises `PlanError` with every fault: not a map, empty, an unknown style, blocks that are not positive integers.
    """
    if not isinstance(raw, Mapping):
        raise PlanError(f"{where}: expected a map of module pattern to style, found {type(raw).__name__}")
    if not raw:
        raise PlanError(f"{where}: the plan is empty, so nothing would be sharded; name at least one module")
    plan: dict[str, Rule] = {}
    issues: list[str] = []
    for pattern, value in raw.items():
        try:
            plan[str(pattern)] = _parse_rule(value)
        except ValueError as error:
            issues.append(f"{where}: {pattern!r}: {error}")
    if issues:
        raise PlanError(*issues)
    return plan


def _parse_rule(value: object) -> Rule:
    kind = type(value).__name__
    if isinstance(value, Rule):
        return value
    if kind in _PACKED_OBJECTS:
        return Rule(_PACKED_OBJECTS[kind], _parse_blocks(getattr(value, "blocks", None)))
    if isinstance(value, Mapping):
        if not set(value) <= {"style", "blocks", "dim"} or "style" not in value:
            raise ValueError(f'expected {{"style": ..., "blocks": [...]}}, found the keys {sorted(map(str, value))}')
        rule = Rule(_parse_style(value["style"]), _parse_blocks(value.get("blocks")), value.get("dim"))
        if (rule.style is Style.PARAMETER) != (type(rule.dim) is int and rule.dim >= 0):
            raise ValueError(f"a dim is for the style 'parameter' and for no other, found {rule.dim!r}")
        if rule.blocks is not None and not rule.style.is_packed and rule.style is not Style.PARAMETER:
            packed = Style.PACKED_COLWISE if rule.style.dim == 0 else Style.PACKED_ROWWISE
            raise ValueError(f"style {rule.style.value!r} takes no blocks; use {packed.value}")
        return rule
    rule = Rule(_parse_style(value))
    if rule.style is Style.PARAMETER:
        raise ValueError('expected {"style": "parameter", "dim": ...}')
    return rule


def _parse_style(value: object) -> Style:
    if isinstance(value, str) and value in ALIASES:
        return ALIASES[value]
    try:
        return Style(value)
    except ValueError:
        known = ", ".join([style.value for style in Style] + list(ALIASES))
        raise ValueError(f"unknown style {value!r}; supported: {known}") from None


def _parse_blocks(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not value or not all(type(b) is int and b > 0 for b in value):
        raise ValueError(f"blocks must be a list of positive integers, found {value!r}")
    return tuple(value)


def plan_to_json(plan: Plan) -> dict[str, object]:
    """The plan as a plan file states it; `parse_plan` gives it back."""
    return {pattern: _rule_to_json(rule) for pattern, rule in plan.items()}


def _rule_to_json(rule: Rule) -> object:
    blocks = {} if rule.blocks is None else {"blocks": list(rule.blocks)}
    dim = {} if rule.dim is None else {"dim": rule.dim}
    return {"style": rule.style.value, **dim, **blocks} if blocks or dim else rule.style.value


def read_plan_file(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file. Raises `PlanError` when it is missing, not JSON, names a pattern twice or is no plan."""
    path = Path(path)
    try:
        raw = parse(path.read_bytes())
    except OSError as error:
        raise PlanError(f"{path}: cannot read the plan file ({error.strerror})") from None
    except ValueError as error:
        raise PlanError(f"{path}: expected a JSON object of module pattern to style ({error})") from None
    return parse_plan(raw, str(path))


AUTO_ROWS: Final = "auto-rows"  # what a person writes instead of a plan file


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """Which plan a model is to be cut by: its class's own, that one with more cut for memory, every `Linear` by its
    rows, or one that was given."""

    kind: Literal["own", "lean", "auto-rows", "given"] = "own"
    given: Plan | None = None

    @classmethod
    def of(
        cls, plan: Mapping[str, Any] | str | os.PathLike[str] | None, lean: bool = False, flags: str = ""
    ) -> PlanChoice:
        """From what people say: a map, a plan file, "auto-rows" or nothing; `flags` is what they write before `lean`.

        Raises `PlanError` for a plan that is none, `UsageError` for `lean` beside a plan.
        """
        if lean and plan is not None:
            raise UsageError(
                f"{flags}lean: adds to the class's own plan, and {flags}plan replaces it; give one of them"
            )
        if plan is None:
            return cls("lean" if lean else "own")
        if plan == AUTO_ROWS:
            return cls(AUTO_ROWS)
        return cls("given", parse_plan(plan, "plan") if isinstance(plan, Mapping) else read_plan_file(plan))

    @property
    def is_own(self) -> bool:
        """Whether it follows from the class."""
        return self.kind in ("own", "lean")

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives the choice back."""
        return {"kind": self.kind, "given": None if self.given is None else plan_to_json(self.given)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PlanChoice:
        """From what `to_json` gave."""
        return cls(raw["kind"], None if raw["given"] is None else parse_plan(raw["given"], "plan"))


OWN = PlanChoice()
