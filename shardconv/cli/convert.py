"""`shardconv convert`."""

from __future__ import annotations

import argparse

from ..commands.convert import convert_all
from ..commands.options import DTYPES, Options
from ..format.plan import PlanChoice
from ..format.summary import human
from .output import DONE, report, report_json, talk
from .progress import progress_bars
from .report import as_json, as_text

NAME = "convert"
HELP = "pre-shard a checkpoint: one safetensors file per rank"
DESCRIPTION = """Pre-shard a diffusers checkpoint for N ranks. SOURCE is a component folder, a pipeline folder (every
component whose class has a plan is sharded, the others are hard-linked) or a Hub repo id."""
EXAMPLE = """example:
  $ shardconv convert --tp 4 FLUX.1-dev out/
  $ shardconv convert --tp 4 --dry-run FLUX.1-dev out/              # headers only: what each rank would hold
  $ shardconv convert --tp 2 --subfolder transformer --dtype bf16 FLUX.1-dev out/
  $ shardconv convert --tp 8 --lean Qwen-Image out/                 # 5 GB a rank instead of 17
  $ shardconv convert --tp 2 --plan plan.json MiniMax-H3/transformer out/
  $ shardconv convert --tp 2 --plan auto-rows MyModel/transformer out/     # a class without a plan: saves memory only

plan.json maps module patterns to styles (colwise, rowwise, rowwise_split_input, packed_colwise, packed_rowwise,
norm_across_heads; parameter with a dim):
  {"blocks.*.attn.to_q": "colwise", "blocks.*.attn.to_out.0": "rowwise",
   "blocks.*.ff.proj": {"style": "packed_colwise", "blocks": [1, 1]}, "blocks.*.ff.out": "rowwise"}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    add = parser.add_argument
    add("source", metavar="SOURCE", help="component folder, pipeline folder or Hub repo id")
    add("out", metavar="OUT", help="folder to write into; the set goes to OUT/[component/]tpN")
    add("--tp", type=int, required=True, metavar="N", help="number of ranks that share the model")
    add("--subfolder", metavar="NAME", help="take this component alone, into OUT/NAME")
    add("--variant", metavar="V", help="weight files of this variant, e.g. fp16")
    add("--revision", metavar="R", help="branch, tag or commit of a Hub repo")
    add("--dtype", choices=sorted(DTYPES), help="cast real floating point; default: as stored")
    add("--plan", metavar="FILE", help="plan to use instead of the class's own (JSON, see below), or auto-rows")
    add("--lean", action="store_true", help="also cut modulation and embedder projections, which plans leave whole")
    add("--self-contained", action="store_true", help="write replicated tensors into each rank's file")
    add("--overwrite", action="store_true", help="replace a set of the same degree")
    add("--dry-run", action="store_true", help="print the plan; read headers and configs only, write nothing")
    add("--low-disk", action="store_true", help="of a Hub repo, have one weight file at a time on this disk")
    add("--only", nargs="+", default=(), metavar="NAME", help="of a pipeline, shard these components and no others")
    add("--whole", nargs="+", default=(), metavar="NAME", help="of a pipeline, leave these components as they are")
    add("--json", action="store_true", help="print one JSON document instead of text")
    add("--quiet", action="store_true", help="print nothing but errors")


def run(args: argparse.Namespace) -> None:
    """Convert, then report."""
    options = Options(
        tp=args.tp,
        variant=args.variant,
        dtype=args.dtype,
        plan=PlanChoice.of(args.plan, args.lean, "--"),
        self_contained=args.self_contained,
        overwrite=args.overwrite,
        dry_run=args.dry_run,
        low_disk=args.low_disk,
        only=tuple(args.only),
        whole=tuple(args.whole),
    )
    with progress_bars(args.quiet) as new_progress:
        outcomes = convert_all(
            args.source,
            args.out,
            options,
            subfolder=args.subfolder,
            revision=args.revision,
            new_progress=new_progress,
            tell=lambda text: None if args.quiet else talk(text),
        )
    if not args.quiet:
        for text in [text for outcome in outcomes for text in outcome.warnings]:
            talk(f"warning: {text}")
    download = outcomes[0].download
    if args.json:
        document = {"dry_run": args.dry_run, "sets": [as_json(outcome) for outcome in outcomes]}
        report_json(document | ({"download": dict(download)} if download else {}), DONE)
    elif not args.quiet:
        report("\n\n".join(as_text(outcome, args.dry_run) for outcome in outcomes), DONE)
        if download:
            report(f"\n{args.source}: {human(sum(download.values()))} would be downloaded ({len(download)} files)")
