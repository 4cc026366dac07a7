"""Processes that `check` and `demo` start: run to the end, or a reason that can be read."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import RanksFailed

SAID_LINES = 40  # of what a process wrote before it failed
SAID_CHARACTERS = 20_000
POLL_S = 0.02


def run_together(verb: str, commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Run a process for each of `commands` to its end; what they write on stderr goes to files in `folder`. When one
    fails the others, which may wait for it, are ended, as all of them are on Ctrl-C.

    Raises `RanksFailed` with how the first ended and what it wrote last.
    """
    children: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with open(folder / f"said-{number}", "wb") as said:
                children.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
                    )
                )
        failed = _first_failed(children)
    finally:
        for child in children:
            if child.poll() != 0:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # with what it has started
                child.wait()
    if failed is not None:
        who = f"rank {failed}" if len(children) > 1 else "the ranks"
        raise ranks_failed(verb, who, children[failed].returncode, folder / f"said-{failed}")


def _first_failed(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The number of the first child that fails, None when all end well."""
    while True:
        codes = [child.poll() for child in children]
        failed = [number for number, code in enumerate(codes) if code]
        if failed:
            return min(failed, key=lambda number: (codes[number] or 0) > 0)  # a kill is what others fail from
        if None not in codes:
            return None
        time.sleep(POLL_S)


def ranks_failed(verb: str, who: str, code: int, said: Path) -> RanksFailed:
    """The error for a process that `verb` started, `who`, and that ended with the exit `code` after writing `said`."""
    lines = said.read_text(errors="backslashreplace")[-SAID_CHARACTERS:].expandtabs().strip().splitlines()
    what = ", the last it wrote:" if lines else " without a word"
    return RanksFailed(f"{verb}: {who} failed ({how_ended(code)}){what}", *lines[-SAID_LINES:])


def how_ended(code: int) -> str:
    """An exit code as `subprocess` gives it, in words."""
    if code >= 0:
        return f"exit code {code}"
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
    return f"ended by {name}" + (", was memory short?" if -code == signal.SIGKILL else "")
