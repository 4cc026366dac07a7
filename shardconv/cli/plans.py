"""`shardconv plans`."""

from __future__ import annotations

import argparse
import json

from ..catalogue.listing import Row, plan_of, rows

NAME = "plans"
HELP = "list the classes that can be sharded, or print the plan of one"
DESCRIPTION = """List every class with a plan, the tp degrees it allows and what a rank would hold, by the class's own
default configuration and 2 bytes a parameter; with CLASS print its plan as a plan file. CLASS may be a component folder:
then the plan is the one for its config."""
EXAMPLE = """example:
  $ shardconv plans
  $ shardconv plans WanTransformer3DModel > my-plan.json     # to change it, then: shardconv check ... --plan
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
        print(json.dumps(plan_of(args.model_class), indent=2))
    elif args.json:
        print(json.dumps([_as_json(row) for row in rows()], indent=2))
    else:
        print(f"{'class':<40} {'degrees':<20} {'whole':>9} {'per rank':>15}  needs")
        for row in rows():
            print(_as_text(row), flush=True)


def _as_json(row: Row) -> dict[str, object]:
    return {
        "model_class": row.model_class,
        "degrees": list(row.degrees),
        "nbytes": row.nbytes,
        "rank_nbytes": row.rank_nbytes,
        "needs": list(row.needs),
    }


def _as_text(row: Row) -> str:
    from ..summary import human

    degrees = ",".join(str(tp) for tp in row.degrees if tp > 1)
    rank = f"{human(row.rank_nbytes)} at {row.degrees[-1]}"
    return f"{row.model_class:<40} {degrees:<20} {human(row.nbytes):>9} {rank:>15}  {', '.join(row.needs)}"
