"""`shardconv plans`."""

from __future__ import annotations

import argparse

from ..commands.plans import Row, plan_of, rows
from .output import report, report_json

NAME = "plans"
HELP = "list the classes that can be sharded, or print the plan of one"
DESCRIPTION = """List every class with a plan: the tp degrees up to 8 that it allows, what stays replicated and what a
rank holds at the largest degree, of a released model at 2 bytes a parameter. With CLASS print its plan as a plan file;
CLASS may be a component folder, the plan is the one for its config then."""
EXAMPLE = """example:
  $ shardconv plans
  $ shardconv plans WanTransformer3DModel              # a plan file: change it, then shardconv check ... --plan
  $ shardconv plans HiDream-I1-Full/transformer        # for the config in this folder
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument(
        "model_class", nargs="?", metavar="CLASS", help="print the plan of this class, or of the model in this folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def run(args: argparse.Namespace) -> None:
    """List, or print one."""
    if args.model_class:
        report_json(plan_of(args.model_class))
    elif args.json:
        report_json([_as_json(row) for row in rows()])
    else:
        report(f"{'class':<40}{'degrees':<11}{'whole':>8}{'repl.':>6}{'rank':>8}{'--lean':>7}{'rank':>8}  needs")
        for row in rows():
            report(_as_text(row))


def _as_json(row: Row) -> dict[str, object]:
    return {
        "model_class": row.model_class,
        "degrees": list(row.degrees),
        "nbytes": row.nbytes,
        "rank_nbytes": row.rank_nbytes,
        "replicated_share": round(row.replicated_share, 4),
        "lean_rank_nbytes": row.lean_rank_nbytes,
        "lean_replicated_share": round(row.lean_replicated_share, 4),
        "needs": list(row.needs),
    }


def _as_text(row: Row) -> str:
    from ..format.summary import human

    degrees = ",".join(str(tp) for tp in row.degrees if tp > 1)
    plain = f"{row.replicated_share:>6.0%}{human(row.rank_nbytes):>8}"
    lean = f"{row.lean_replicated_share:>7.0%}{human(row.lean_rank_nbytes):>8}"
    return f"{row.model_class:<40}{degrees:<11}{human(row.nbytes):>8}{plain}{lean}  {', '.join(row.needs)}"
