"""What the command line prints: data on stdout, talk on stderr, whatever these streams are."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import TextIO

from ..errors import OutputError

DONE = "; the work itself is done"  # for `report` of a verb that has written something else before


class ReaderGone(Exception):
    """Whoever read stdout went away, e.g. head."""


def open_streams() -> None:
    """Make the three standard streams usable, before anything else is opened.

    One that the caller closed leads to nowhere: its number would otherwise be given to the next file that is opened,
    and what is printed would end up in that. What a stream's encoding lacks is printed escaped.
    """
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free number, which is this one
            os.set_inheritable(fd, True)  # processes started from here have three streams as well
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (lasts as long as the process)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def report(text: str, done: str = "", end: str = "\n") -> None:
    """Print on stdout at once. Raises `ReaderGone`, or `OutputError` when it cannot be written, with what is `done`."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        _abandon(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from None
        raise OutputError(f"standard output: cannot be written ({error.strerror}){done}") from None


def report_json(document: object, done: str = "") -> None:
    """Print one JSON document. Raises `ValueError` for numbers that JSON does not have (infinite, not a number)."""
    report(json.dumps(document, indent=2, allow_nan=False), done)


def talk(text: str, end: str = "\n") -> None:
    """Print a line on stderr; nobody may be there to read it."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        _abandon(sys.stderr)


def flush_streams() -> None:
    """Write out what others have printed. Raises as `report` does."""
    talk("", end="")
    report("", end="")


def _abandon(stream: TextIO) -> None:
    """Let what is still to be written to `stream` go nowhere: the interpreter tries it once more at its end, and exits
    with a code of its own when that fails."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
