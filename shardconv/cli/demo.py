"""`shardconv demo`."""

from __future__ import annotations

import argparse

from ..plans.catalogue.small_models import NAMES
from .output import report

NAME = "demo"
HELP = "build, convert, run on 2 CPU ranks and compare: the whole tool in one screen"
DESCRIPTION = """Build a small model with random weights, convert it for 2 ranks, run it on 2 CPU ranks and compare the
output with the unsharded model. Needs no GPU and no network."""
EXAMPLE = """example:
  $ shardconv demo
  $ shardconv demo --model qwenimage --keep demo-files
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument("--model", choices=NAMES, default="flux2", help="which architecture (default: flux2)")
    parser.add_argument("--keep", metavar="DIR", help="leave the files in DIR, which must not exist yet")


def run(args: argparse.Namespace) -> None:
    """Show the demo."""
    from ..trial.demo import run_demo

    run_demo(args.model, args.keep, say=report)
