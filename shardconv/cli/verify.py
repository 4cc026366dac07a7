"""`shardconv verify`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from ..commands.verify import Verified, verify_all
from ..errors import SetError
from ..format.summary import human
from .output import report, report_json, talk
from .progress import progress_bars

NAME = "verify"
HELP = "check every byte of a set, also against its source"
DESCRIPTION = """Check manifest, headers, lengths and digests of the sets at PATH: a set (tpN), a component folder, an
output folder, or one rank file with its manifest beside it. Every problem is listed at once; exit code 1 if there is
one."""
EXAMPLE = """example:
  $ shardconv verify out/
  $ shardconv verify out/transformer/tp4/rank-00002-of-00004.safetensors
  $ shardconv verify out/ --source FLUX.1-dev               # bit for bit, after the recorded cast
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    parser.add_argument("path", metavar="PATH", help="set, component folder, output folder or rank file")
    parser.add_argument("--source", metavar="SOURCE", help="compare with what was converted: folder or Hub repo id")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def run(args: argparse.Namespace) -> None:
    """Verify, say what is right, and raise what is not."""
    with progress_bars(args.quiet) as new_progress:
        found = verify_all(args.path, args.source, new_progress)
    issues = [issue for each in found for issue in each.issues]
    try:
        if args.json:
            report_json({"ok": not issues, "source": args.source, "sets": list(map(_as_json, found))})
        elif not args.quiet:
            _tell(found, args.source)
    finally:  # whether or not anybody reads the rest
        if issues:
            raise SetError(*issues)


def _tell(found: Iterable[Verified], source: str | None) -> None:
    for each in found:
        if each.ignored:
            talk(f"{each.path}: {', '.join(each.ignored)} ignored, hidden files are no part of a set")
        if not each.issues:
            report(_as_text(each, source))


def _as_json(found: Verified) -> dict[str, object]:
    manifest = found.manifest
    return {
        "path": str(found.path),
        "model_class": manifest.model_class if manifest else None,
        "tp_degree": manifest.tp_degree if manifest else None,
        "conversion_id": manifest.conversion_id if manifest else None,
        "verified_nbytes": found.nbytes,
        "issues": list(found.issues),
        "ignored": list(found.ignored),
    }


def _as_text(found: Verified, source: str | None) -> str:
    assert found.manifest is not None
    equal = f", bit for bit what converting {source} gives" if source else ""
    about = f"{found.manifest.model_class}, tp degree {found.manifest.tp_degree}"
    return f"{found.path}: {about}, {human(found.nbytes)} of tensors as the manifest says{equal}"
