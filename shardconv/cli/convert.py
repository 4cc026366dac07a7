"""`shardconv convert`."""

from __future__ import annotations

import argparse

from ..commands.convert import convert_all
from ..commands.outcome import Outcome
from ..commands.prepare import DTYPES, Options
from ..format.manifest import Manifest
from ..format.plan import read_plan_file
from ..format.summary import Summary, human, summarize
from ..plans.auto_rows import AUTO_ROWS
from .output import DONE, report, report_json, talk
from .progress import progress_bars

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
    add("--json", action="store_true", help="print one JSON document instead of text")
    add("--quiet", action="store_true", help="print nothing but errors")


def run(args: argparse.Namespace) -> None:
    """Convert, then report."""
    options = Options(
        tp=args.tp,
        variant=args.variant,
        dtype=args.dtype,
        plan=AUTO_ROWS if args.plan == AUTO_ROWS else read_plan_file(args.plan) if args.plan else None,
        lean=args.lean,
        self_contained=args.self_contained,
        overwrite=args.overwrite,
        dry_run=args.dry_run,
        low_disk=args.low_disk,
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


def as_json(outcome: Outcome) -> dict[str, object]:
    """One set of the document that `--json` prints."""
    return {
        "component": outcome.component,
        "folder": str(outcome.folder),
        "already_there": outcome.was_there,
        **figures(outcome.manifest),
        "warnings": list(outcome.warnings),
        **(
            {"degrees": list(outcome.forecast.degrees), "rank_nbytes_by_plan": dict(outcome.forecast.rank_nbytes)}
            if outcome.forecast
            else {}
        ),
    }


def figures(manifest: Manifest) -> dict[str, object]:
    """What a set is and weighs, for `--json`."""
    summary = summarize(manifest)
    return {
        "conversion_id": manifest.conversion_id,
        "model_class": manifest.model_class,
        "tp_degree": manifest.tp_degree,
        "self_contained": manifest.self_contained,
        "cast_to": manifest.cast_to,
        "nbytes": summary.nbytes,
        "set_nbytes": summary.set_nbytes,
        "rank_nbytes": summary.rank_nbytes,
        "replicated_nbytes": summary.replicated_nbytes,
        "replicated_share": round(summary.replicated_share, 4),
        "styles": {
            style.style: {"tensors": style.tensors, "nbytes": style.nbytes, "rank_nbytes": style.rank_nbytes}
            for style in summary.styles
        },
        "dtypes": summary.dtypes,
        "files": {file.name: file.nbytes for file in manifest.files},
        "left_out": list(manifest.left_out),
    }


def as_text(outcome: Outcome, dry_run: bool) -> str:
    """A table of one set for a person."""
    manifest, summary = outcome.manifest, summarize(outcome.manifest)
    state = "would be written" if dry_run else "there already, unchanged" if outcome.was_there else "written"
    head = f"{outcome.folder}: {manifest.model_class}, tp degree {manifest.tp_degree}, {state}"
    lines = [head, *table(manifest.tp_degree, summary)]
    if outcome.forecast:
        lines.append(f"  tp degrees that fit: {', '.join(map(str, outcome.forecast.degrees))}")
        sizes = outcome.forecast.rank_nbytes
        if "lean" in sizes:
            lines.append(f"  a rank holds {human(sizes['plain'])}, with --lean {human(sizes['lean'])}")
    return "\n".join(lines)


def table(tp: int, summary: Summary) -> list[str]:
    """The lines that show a set's figures to a person."""
    lines = [f"  {'style':<20} {'tensors':>8} {'whole':>10} {'per rank':>10}"]
    for style in summary.styles:
        lines.append(f"  {style.style:<20} {style.tensors:>8} {human(style.nbytes):>10} {human(style.rank_nbytes):>10}")
    nr = sum(style.tensors for style in summary.styles)
    lines.append(f"  {'all':<20} {nr:>8} {human(summary.nbytes):>10} {human(summary.rank_nbytes):>10}")
    return lines + _notes(tp, summary)


def _notes(tp: int, summary: Summary) -> list[str]:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in summary.dtypes.items())
    lines = [f"  dtypes: {dtypes} tensors; files: {human(summary.set_nbytes)} in all"]
    gain = summary.nbytes / summary.rank_nbytes if summary.rank_nbytes else 1.0
    line = (
        f"  each of {tp} ranks holds 1/{gain:.2f} of the model; {summary.replicated_share:.0%} of it stays replicated"
    )
    if summary.largest_replicated:
        line += ", the largest: " + ", ".join(f"{name} {human(nbytes)}" for name, nbytes in summary.largest_replicated)
    return [*lines, line]
