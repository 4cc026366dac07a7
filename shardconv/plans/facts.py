"""What a conversion needs to know of a model: plain data, made from a skeleton, which can cross to another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import PlanError
from ..format.cut import Cut
from ..format.plan import Plan, PlanChoice, Rule, Style
from ..libraries.choose import library_of, model_class
from ..libraries.skeleton import skeleton, stored_tensors, tied_names
from .choice import other_plan, plan_of, version_warning
from .heads import head_counts


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model class, built by one config and cut by one plan."""

    model_class: str
    library_name: str
    library_version: str
    plan: Plan
    tensors: Mapping[str, tuple[int, ...]]  # name -> shape of every parameter and persistent buffer
    tied: tuple[tuple[str, ...], ...]  # names that are one parameter
    ignored: tuple[str, ...]  # regular expressions of unexpected tensors that loaders ignore
    fp32_modules: Mapping[str, tuple[str, ...]]  # kept in fp32 under a cast to that dtype, a name of the format
    cuts: Mapping[str, tuple[Style, Cut | None]]  # parameter -> style, cut; the others are replicated
    head_counts: tuple[int, ...]  # of planned attentions, each once, ascending; tp degrees must divide them
    degrees: tuple[int, ...]  # the tp degrees up to 16 that fit
    plan_issues: tuple[str, ...]  # why the plan does not fit; there are no cuts then
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives the record back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelFacts:
        """From what `to_json` gave, also after a passage through JSON text."""
        return cls(
            model_class=raw["model_class"],
            library_name=raw["library_name"],
            library_version=raw["library_version"],
            plan={
                key: Rule(Style(rule["style"]), _sizes(rule["blocks"]), rule["dim"])
                for key, rule in raw["plan"].items()
            },
            tensors={name: tuple(shape) for name, shape in raw["tensors"].items()},
            tied=tuple(map(tuple, raw["tied"])),
            ignored=tuple(raw["ignored"]),
            fp32_modules={dtype: tuple(names) for dtype, names in raw["fp32_modules"].items()},
            cuts={
                name: (Style(style), cut and Cut(cut["dim"], tuple(cut["block_sizes"])))
                for name, (style, cut) in raw["cuts"].items()
            },
            head_counts=tuple(raw["head_counts"]),
            degrees=tuple(raw["degrees"]),
            plan_issues=tuple(raw["plan_issues"]),
            warnings=tuple(raw["warnings"]),
        )


def _sizes(value: list[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def model_facts(config: Mapping[str, Any], choice: PlanChoice, tp: int) -> ModelFacts:
    """The facts of the model that `config` describes, cut by the plan that `choice` names.

    Raises `CheckpointError` when the class is unknown or the config does not build it.
    """
    from .match import colwise_names
    from .resolve import degrees_of, resolve

    cls = model_class(str(config.get("_class_name")), config)
    library, model = library_of(cls), skeleton(cls, config)
    chosen: Plan = {}
    issues: tuple[str, ...] = ()
    cuts: Mapping[str, tuple[Style, Cut | None]] = {}
    heads: set[int] = set()
    degrees: list[int] = []
    warnings: list[str] = []
    try:
        chosen = plan_of(model, choice, tp)
        resolution = resolve(model, chosen, tp, other_plan(model))
    except PlanError as error:
        issues = error.issues
    else:
        cuts = resolution.cuts
        heads = {count for _, count in head_counts(model, colwise_names(resolution.modules))}
        degrees = degrees_of(model, chosen)
        unchecked = version_warning(model) if choice.is_own else None
        warnings = [*resolution.warnings, *filter(None, [unchecked])]
    return ModelFacts(
        model_class=cls.__name__,
        library_name=library.name,
        library_version=library.version(),
        plan=chosen,
        tensors=stored_tensors(model),
        tied=tuple(tied_names(model)),
        ignored=library.ignored_patterns(cls),
        fp32_modules={dtype: library.keep_in_fp32(cls, dtype) for dtype in ("BF16", "F16", "F32")},
        cuts=cuts,
        head_counts=tuple(sorted(heads)),
        degrees=tuple(degrees),
        plan_issues=issues,
        warnings=tuple(warnings),
    )
