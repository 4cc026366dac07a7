"""What the command line prints: data on stdout, talk on stderr, whatever these streams are."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys

from ..errors import OutputError


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
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115 (lasts as long as the process)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def abandon_stdout() -> None:
    """Throw away what is still to be written to stdout, so that the interpreter does not try it again at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(text: str) -> None:
    """Print on stdout at once. Raises `OutputError` when that cannot be written to, `BrokenPipeError` when whoever
    read it went away."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output: cannot be written ({error.strerror}); the work itself is done") from None


def report_json(document: object) -> None:
    """Print one JSON document. Raises `ValueError` for numbers that JSON does not have (infinite, not a number)."""
    report(json.dumps(document, indent=2, allow_nan=False))


def talk(text: str) -> None:
    """Print a line on stderr; nobody may be there to read it."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
