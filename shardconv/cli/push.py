"""`shardconv push`."""

from __future__ import annotations

import argparse

from ..commands.push import Pushed, push
from ..errors import UsageError
from ..format.summary import human
from .output import DONE, report, report_json, talk
from .progress import progress_bars

NAME = "push"
HELP = "publish converted sets in a Hub repo, so that each rank downloads only its own file"
DESCRIPTION = """Verify the sets of OUT, then send what REPO_ID does not hold yet: files that manifests list, configs,
the other components of a pipeline, licences and a model card, nothing else. A set appears whole, in one commit, with
what it replaces. Log in first: hf auth login, or HF_TOKEN."""
EXAMPLE = """example:
  $ shardconv push --dry-run out/ my-org/FLUX.2-tp4       # what would be sent
  $ shardconv push --private out/ my-org/FLUX.2-tp4
  $ shardconv push --create-pr --degrees 4,8 out/ their-org/FLUX.2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    add = parser.add_argument
    add("out", metavar="OUT", help="what shardconv convert wrote: an output or component folder")
    add("repo", metavar="REPO_ID", help="org/name; created if need be")
    add("--private", action="store_true", help="if the repo has to be created, make it private")
    add("--revision", metavar="B", help="branch, created from main if need be, or refs/pr/N; default: main")
    add("--create-pr", action="store_true", help="open a pull request instead of committing")
    add("--degrees", metavar="N,N", help="only the sets of these tp degrees; default: all of OUT")
    add("--commit-message", metavar="TEXT", help="default: the names of the sets")
    add("--dry-run", action="store_true", help="verify and compare only; send nothing")
    add("--json", action="store_true", help="print one JSON document instead of text")
    add("--quiet", action="store_true", help="print nothing but errors")


def run(args: argparse.Namespace) -> None:
    """Push, then report."""
    with progress_bars(args.quiet) as new_progress:
        done = push(
            args.out,
            args.repo,
            private=args.private,
            revision=args.revision,
            create_pr=args.create_pr,
            degrees=parse_degrees(args.degrees) if args.degrees else None,
            commit_message=args.commit_message,
            dry_run=args.dry_run,
            new_progress=new_progress,
            tell=lambda text: None if args.quiet else talk(text),
        )
    if args.json:
        report_json({"dry_run": args.dry_run, **_as_json(done)}, DONE)
    elif not args.quiet:
        report(_as_text(done, args.dry_run), DONE)


def parse_degrees(text: str) -> list[int]:
    """Degrees from "4,8". Raises `UsageError`."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--degrees: expected tp degrees such as 4,8, found {text!r}")
    return [int(part) for part in parts]


def _as_json(done: Pushed) -> dict[str, object]:
    return {
        "repo": done.repo,
        "url": done.url,
        "created": done.created,
        "sets": list(done.sets),
        "sent": dict(done.sent),
        "sent_nbytes": sum(done.sent.values()),
        "deleted": list(done.deleted),
    }


def _as_text(done: Pushed, dry_run: bool) -> str:
    if not done.sent and not done.deleted:
        return f"{done.repo}: holds {', '.join(done.sets)} already, nothing sent"
    lines = [f"  {human(nbytes):>10}  {name}" for name, nbytes in done.sent.items()]
    lines += [f"  {'deleted':>10}  {name}" for name in done.deleted]
    verb = "would be sent" if dry_run else "sent"
    head = f"{done.repo}: {verb}: {len(done.sent)} files, {human(sum(done.sent.values()))}"
    return "\n".join([head, *lines, *([done.url] if done.url else [])])
