"""`shardconv check`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

from ..errors import PlanError, printable
from ..format.plan import PlanChoice
from ..trial.check import TOLERANCE, Verdict, check
from .output import report, report_json

NAME = "check"
HELP = "run a plan on CPU ranks and compare with the unsharded model"
DESCRIPTION = """Build a small model of a class with random weights, shard it under its plan on N CPU ranks and compare
with the unsharded output in float32. SUBJECT is a class of the catalogue, or a component folder whose config is taken
with few layers (its weights are not read). Exit code 1 when the plan is wrong, with the layers that differ first."""
EXAMPLE = """example:
  $ shardconv check WanTransformer3DModel --tp 2
  $ shardconv check WanTransformer3DModel --tp 4 --plan my-plan.json     # before you trust a plan of your own
  $ shardconv check Wan2.2-T2V-A14B-Diffusers/transformer --tp 2 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    add = parser.add_argument
    add("subject", metavar="SUBJECT", help="model class of diffusers, or component folder")
    add("--tp", type=int, required=True, metavar="N", help="number of ranks")
    add("--plan", metavar="FILE", help="plan to check instead of the class's own (JSON), or auto-rows")
    add("--json", action="store_true", help="print one JSON document instead of text")


def run(args: argparse.Namespace) -> None:
    """Check, report; a plan that is wrong is an error."""
    verdict = check(args.subject, args.tp, PlanChoice.of(args.plan))
    try:
        if args.json:
            report_json(_as_json(verdict))
        else:
            report(_as_text(verdict))
    finally:  # whether or not anybody reads the rest
        if not verdict.is_right:
            raise PlanError(f"{verdict.model_class}: the plan is wrong at tp degree {verdict.tp}; do not use it")


def _as_json(verdict: Verdict) -> dict[str, object]:
    return {
        "model_class": verdict.model_class,
        "tp_degree": verdict.tp,
        "right": verdict.is_right,
        "difference": _finite(verdict.difference),
        "tolerance": TOLERANCE,
        "issues": list(_issues(verdict)),
        "layers": [{"layer": each.layer, "difference": _finite(each.difference)} for each in verdict.layers],
    }


def _finite(difference: float | None) -> float | None:
    """JSON has no infinity: None then, and an issue says so."""
    return difference if difference is not None and math.isfinite(difference) else None


def _issues(verdict: Verdict) -> Iterator[str]:
    yield from verdict.issues
    if verdict.difference is not None and not math.isfinite(verdict.difference):
        yield "the output is of another shape, or holds what is no number or infinite where the unsharded one does not"


def _as_text(verdict: Verdict) -> str:
    lines = [f"{verdict.model_class}, tp degree {verdict.tp}: {'right' if verdict.is_right else 'WRONG'}"]
    if verdict.difference is not None:
        lines.append(f"  largest difference {verdict.difference:.1e} of the largest output, allowed {TOLERANCE:.0e}")
    lines += [f"  {printable(line)}" for issue in _issues(verdict) for line in issue.splitlines()]
    if not verdict.is_right and verdict.layers:
        lines.append("  first layers that differ:")
        lines += [f"    {each.layer}  {each.difference:.1e}" for each in verdict.layers]
    return "\n".join(lines)
