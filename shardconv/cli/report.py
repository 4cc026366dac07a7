"""Tables and JSON of what was converted."""

from __future__ import annotations

from ..commands.outcome import Outcome
from ..format.manifest import Manifest
from ..format.summary import Summary, human, summarize


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
    num = sum(style.tensors for style in summary.styles)
    lines.append(f"  {'all':<20} {num:>8} {human(summary.nbytes):>10} {human(summary.rank_nbytes):>10}")
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
