"""Every error this project raises on purpose.

    ShardconvError                      anything below; `.issues` lists each fault as one sentence
    |-- UsageError      (ValueError)    the request itself makes no sense (exit code 2 on the command line)
    |-- CheckpointError (ValueError)    the source cannot be converted as it stands
    |-- PlanError       (ValueError)    the plan, the model and the degree do not fit together
    |-- OutputError     (OSError)       the target folder cannot take the set
    |-- SetError        (ValueError)    a converted set is damaged, incomplete or of another conversion
    |-- LoadError       (RuntimeError)  a set cannot be loaded on this group of ranks
    |-- RanksFailed     (RuntimeError)  processes that `check` or `demo` started ended without an answer
    `-- HubError        (OSError)       the Hub refuses, cannot be reached, or lacks what was asked for

A fault reads `subject: expected X, found Y; what to do`. Checks gather every fault and raise once. Names in it may come
from files that others wrote, so a fault is made one line of printable text, of bounded length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

MAX_ISSUE_LENGTH = 1500  # characters; a longer fault loses its middle

_Error = TypeVar("_Error", bound="ShardconvError")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ShardconvError(Exception):
    """Base class. `issues` holds one sentence for each fault, in the order they were found."""

    def __init__(self, *issues: str) -> None:
        self.issues: tuple[str, ...] = tuple(map(one_line, issues))
        super().__init__(str(self))

    def __str__(self) -> str:
        if len(self.issues) == 1:
            return self.issues[0]
        return f"{len(self.issues)} problems:" + "".join(f"\n  - {issue}" for issue in self.issues)

    def __reduce__(self) -> tuple[type[ShardconvError], tuple[str, ...], dict[str, object]]:
        return type(self), self.issues, self.__dict__

    def reworded(self: _Error, change: Callable[[str], str]) -> _Error:
        """The same error with each of its issues as `change` gives it."""
        again = type(self)(*map(change, self.issues))
        again.__dict__.update({name: value for name, value in self.__dict__.items() if name != "issues"})
        return again


def one_line(text: str) -> str:
    """`text` made printable, and shortened."""
    if len(text) > MAX_ISSUE_LENGTH:
        text = f"{text[: MAX_ISSUE_LENGTH - 300]} ... {text[-200:]}"
    return printable(text)


def printable(text: str) -> str:
    """`text` without line breaks, terminal controls or lone surrogates, each escaped as Python would."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


class ShardconvWarning(UserWarning):
    """Something a person should look at; the work goes on."""


class UsageError(ShardconvError, ValueError):
    """The request itself makes no sense."""


class CheckpointError(ShardconvError, ValueError):
    """The source cannot be converted as it stands."""


class PlanError(ShardconvError, ValueError):
    """The plan, the model and the degree do not fit together."""


class OutputError(ShardconvError, OSError):
    """The target folder cannot take the set."""


class SetError(ShardconvError, ValueError):
    """A converted set is damaged, incomplete or of another conversion."""


class LoadError(ShardconvError, RuntimeError):
    """A set cannot be loaded on this group of ranks."""


class RanksFailed(ShardconvError, RuntimeError):
    """Processes that this tool started ended without an answer. `issues` says how, then line by line, none of them
    shortened, what they wrote last."""

    def __init__(self, *issues: str) -> None:
        self.issues = tuple(map(printable, issues))
        Exception.__init__(self, str(self))

    def __str__(self) -> str:
        return "\n    ".join(self.issues)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at a moment when something stands already; says what, for whoever prints it."""


class HubError(ShardconvError, OSError):
    """The Hub refuses, cannot be reached, or lacks what was asked for."""

    kind: str = ""  # "gated", "no repo", "no revision"; "" is anything else


def every(work: Callable[[_Item], _Result], items: Iterable[_Item], mixed: type[ShardconvError]) -> list[_Result]:
    """`work` of each item; the faults of all of them in one error, of their class or, when they differ, `mixed`."""
    results: list[_Result] = []
    errors: list[ShardconvError] = []
    for item in items:
        try:
            results.append(work(item))
        except ShardconvError as error:
            errors.append(error)
    if errors:
        raise as_one(errors, mixed)
    return results


def as_one(errors: Sequence[ShardconvError], mixed: type[ShardconvError]) -> ShardconvError:
    """One error with the faults of all `errors`, of their class and kind or, when they differ, `mixed`."""
    cls = type(errors[0]) if len({type(error) for error in errors}) == 1 else mixed
    joined = cls(*(issue for error in errors for issue in error.issues))
    kinds = {error.kind if isinstance(error, HubError) else "" for error in errors}
    if isinstance(joined, HubError) and len(kinds) == 1:
        joined.kind = kinds.pop()
    return joined
