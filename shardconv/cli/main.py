"""`shardconv VERB ...`: parses, calls the verb, and is the one place where an error becomes an exit code."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import ShardconvError, UsageError
from . import check, convert, demo, inspect, merge, plans, push, reshard, verify
from .output import ReaderGone, flush_streams, open_streams, talk

VERBS = (convert, inspect, verify, merge, reshard, push, plans, check, demo)

EXAMPLE = """example:
  $ shardconv convert --tp 4 black-forest-labs/FLUX.2-dev out/     # once, on any machine
  $ torchrun --nproc-per-node 4 serve.py                           # loader.load_pipeline("out") in it
  $ shardconv demo                                                 # all of it in small, on this machine
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="shardconv",
        description="Pre-shard diffusers models for tensor parallelism, so that each rank loads only its own file.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"shardconv {__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        sub = verbs.add_parser(
            verb.NAME,
            help=verb.HELP,
            description=verb.DESCRIPTION,
            epilog=verb.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(sub)
        sub.set_defaults(run=verb.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 when it worked, 1 when it failed, 2 when it was asked wrongly, 130 on Ctrl-C."""
    open_streams()
    debug = os.environ.get("SHARDCONV_DEBUG") == "1"
    try:
        _run(argv, debug)
    except KeyboardInterrupt as stopped:
        talk(f"shardconv: stopped; {str(stopped) or 'nothing half-done is left behind'}")
        return 130
    except ReaderGone:
        return 1
    except Exception as error:
        if debug:
            raise
        if not isinstance(error, (ShardconvError, OSError)):
            talk(f"shardconv: {type(error).__name__}: {error} (SHARDCONV_DEBUG=1 shows where)")
        else:
            talk(f"shardconv: {error}")
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _run(argv: Sequence[str] | None, debug: bool) -> None:
    try:
        args = parser().parse_args(argv)
        _hush_the_hub(getattr(args, "quiet", False))
        if debug:
            logging.basicConfig(format="%(name)s: %(message)s")
            logging.getLogger("shardconv").setLevel(logging.DEBUG)
        args.run(args)
    except SystemExit:  # the parser has printed
        flush_streams()
        raise
    flush_streams()


def _hush_the_hub(quiet: bool) -> None:
    """The Hub's client, which reads this when it is imported: its failures are ours to report, its progress bars are
    for terminals."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if quiet or not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def entry() -> None:
    """The console script. Looking for garbage among what torch and diffusers leave takes longer than a small
    conversion, at imports and once more at the end; a process this short does without."""
    gc.disable()
    code = main()
    gc.freeze()
    sys.exit(code)
