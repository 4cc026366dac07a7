"""`shardconv merge`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..commands.merge import MAX_SHARD_NBYTES, merge
from ..errors import UsageError
from .output import DONE, report, report_json
from .progress import progress_bars

NAME = "merge"
HELP = "turn a converted set back into an ordinary diffusers checkpoint"
DESCRIPTION = """Write the model of a set as diffusers saves it: bit-identical tensors, config.json, an index when there
are several files. PATH is a component folder, one of its tpN folders, or an output folder, which gives the pipeline
back; OUT must be new or empty."""
EXAMPLE = """example:
  $ shardconv merge out/ merged/
  $ shardconv merge out/transformer merged/transformer
  $ shardconv merge --max-shard-size 5GB out/transformer/tp4 merged/transformer
"""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument("path", metavar="PATH", help="component folder, one of its tpN folders, or output folder")
    parser.add_argument("out", metavar="OUT", help="folder to write, new or empty")
    parser.add_argument("--max-shard-size", metavar="SIZE", default=str(MAX_SHARD_NBYTES), help="default: 10GB")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def run(args: argparse.Namespace) -> None:
    """Merge, then name the files."""
    limit = parse_size(args.max_shard_size)
    with progress_bars(args.quiet) as new_progress:
        names = merge(args.path, args.out, max_shard_nbytes=limit, new_progress=new_progress)
    if args.json:
        files = {name: (Path(args.out) / name).stat().st_size for name in names}
        report_json({"folder": args.out, "files": files}, DONE)
    elif not args.quiet:
        report("\n".join(f"{args.out}/{name}" for name in names), DONE)


def parse_size(text: str) -> int:
    """Bytes from a number with an optional unit (5GB, 512MiB). Raises `UsageError`."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS or int(match[1]) == 0:
        raise UsageError(f"--max-shard-size: expected a size such as 5GB, found {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]
