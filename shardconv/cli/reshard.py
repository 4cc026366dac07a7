"""`shardconv reshard`."""

from __future__ import annotations

import argparse

from ..commands.reshard import reshard_all
from .output import DONE, report, report_json, talk
from .progress import progress_bars
from .report import as_json, as_text

NAME = "reshard"
HELP = "change the degree of a converted set, without its source"
DESCRIPTION = """Write the set at PATH for another number of ranks: the same files as converting its source for them.
PATH is a set (tpN), a component folder or an output folder; OUT may be the same, as degrees stand side by side."""
EXAMPLE = """example:
  $ shardconv reshard --tp 8 out/ out/                      # out/transformer/tp8 beside out/transformer/tp4
  $ shardconv reshard --tp 2 out/transformer/tp4 other/transformer
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    add = parser.add_argument
    add("path", metavar="PATH", help="set, component folder or output folder")
    add("out", metavar="OUT", help="folder to write into; the set goes to OUT/[component/]tpM")
    add("--tp", type=int, required=True, metavar="M", help="number of ranks that share the model")
    add(
        "--self-contained",
        action=argparse.BooleanOptionalAction,
        help="write replicated tensors into each rank's file, or not; default: as the set has them",
    )
    add("--overwrite", action="store_true", help="replace a set of the same degree")
    add("--json", action="store_true", help="print one JSON document instead of text")
    add("--quiet", action="store_true", help="print nothing but errors")


def run(args: argparse.Namespace) -> None:
    """Reshard, then report as convert does."""
    with progress_bars(args.quiet) as new_progress:
        outcomes = reshard_all(
            args.path,
            args.out,
            tp=args.tp,
            self_contained=args.self_contained,
            overwrite=args.overwrite,
            new_progress=new_progress,
        )
    if not args.quiet:
        for text in [text for outcome in outcomes for text in outcome.warnings]:
            talk(f"warning: {text}")
    if args.json:
        report_json({"sets": [as_json(outcome) for outcome in outcomes]}, DONE)
    elif not args.quiet:
        report("\n\n".join(as_text(outcome, False) for outcome in outcomes), DONE)
