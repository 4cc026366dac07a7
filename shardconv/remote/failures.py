"""What went wrong between us and the Hub, as one sentence with the next step; and whether waiting may help.

Errors are told apart by the names of their classes: so nothing is imported, and the client's versions 1 and 2, which
stand on different HTTP libraries, are read alike.
"""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import HubError, ShardconvError
from ..system.crew import Stopped
from .tokens import without_secrets

ATTEMPTS = 5  # in all, for one request
WAIT_S = 1.0  # before the second attempt, doubled each time
MAX_WAIT_S = 60.0  # of what the Hub asks us to wait
NOT_CACHED = "not in the cache, and the Hub is not asked or does not answer; fetch it once with a network"
_BROKEN = {"ReadError", "WriteError", "ReadTimeout", "WriteTimeout", "RemoteProtocolError", "CloseError"}

T = TypeVar("T")


def patiently(
    subject: str, secrets: Callable[[], tuple[str, ...]], ask: Callable[[], T], revision: str | None = None
) -> T:
    """`ask()`, again with growing pauses while the Hub is busy or the connection breaks, at most `ATTEMPTS` times.

    Raises `HubError` with one sentence about `subject`. None of `secrets` stands in it, nor in anything that is raised
    with it. `revision` is the one asked for; None is main.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return ask()
        except (ShardconvError, Stopped):
            raise
        except Exception as raised:  # whatever the client and the HTTP library under it have
            failed = _failure(raised, attempt, subject, secrets, revision or "main")
        if isinstance(failed, HubError):
            raise failed  # not in the handler: what the client raised, which may show a token, would be its context
        time.sleep(failed)
    raise AssertionError("unreachable")


def _failure(
    raised: Exception, attempt: int, subject: str, secrets: Callable[[], tuple[str, ...]], revision: str
) -> HubError | float:
    """What to raise; or the seconds to wait before the next attempt."""
    error = _root(raised)
    wait = _wait(error, attempt)
    if wait is not None and attempt < ATTEMPTS:
        return wait
    known = secrets()
    explained = _explain(error, attempt, revision)
    failed = HubError(without_secrets(f"{subject}: {explained or _unforeseen(error)}", known))
    failed.kind = _kind(error)
    if not explained:  # then where it comes from may help
        failed.__cause__ = Exception(without_secrets("".join(traceback.format_exception(raised)), known))
    return failed


def _root(error: BaseException) -> BaseException:
    """What the HTTP library or the system said; the client wraps it in errors that do not say it."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    telling = (each for each in chain if _status(each) or _names(each) & {"HTTPError", "OfflineModeIsEnabled"})
    # "Not in the cache" is what the client says in the end whatever kept it from asking.
    reasons = [each for each in chain if isinstance(each, OSError) and "LocalEntryNotFoundError" not in _names(each)]
    return next(telling, next(iter(reasons), chain[-1]))


def _names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _status(error: BaseException) -> int:
    """HTTP status; 0 when there was no answer."""
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _kind(error: BaseException) -> str:
    kinds = {"GatedRepoError": "gated", "RepositoryNotFoundError": "no repo", "RevisionNotFoundError": "no revision"}
    return next((kind for name, kind in kinds.items() if name in _names(error)), "")


def _wait(error: BaseException, attempt: int) -> float | None:
    """Seconds after which another attempt makes sense; None when none does."""
    status = _status(error)
    if not (status in (408, 429) or status >= 500 or _names(error) & _BROKEN or "Consistency check" in str(error)):
        return None
    response: Any = getattr(error, "response", None)
    asked = response.headers.get("Retry-After", "") if response is not None else ""
    if asked.isdecimal():
        return min(float(asked), MAX_WAIT_S)
    return float(WAIT_S * 2 ** (attempt - 1))


def _explain(error: BaseException, attempts: int, revision: str) -> str:
    """The sentence; "" for what was not foreseen."""
    names, status = _names(error), _status(error)
    said = _said(error)
    if "GatedRepoError" in names:
        who = "no token was sent" if status == 401 else "your account has no access yet"
        step = "accept its terms on its page, then: hf auth login" if status == 401 else "ask for it on its page"
        return f"gated, and {who}; {step}"
    if "RepositoryNotFoundError" in names:
        return "repository not found on the Hub; check the name, or log in if it is private: hf auth login"
    if "RevisionNotFoundError" in names:
        return f"no revision {revision!r} in the repo; check its branches and tags on its page"
    if names & {"EntryNotFoundError", "RemoteEntryNotFoundError"} and status == 404:
        return f"the repo has no such file at {revision}; check the name"
    if names & {"OfflineModeIsEnabled", "LocalEntryNotFoundError"} and not status:
        return NOT_CACHED
    if "FileMetadataError" in names:
        return f"the server does not answer as the Hub does ({said}); check HF_ENDPOINT, a mirror must pass on headers"
    if status == 401 or "LocalTokenNotFoundError" in names:
        return f"the Hub knows no such login ({said}); log in: hf auth login"
    if status == 403:
        return f"the Hub refuses ({said}); use a token that may do this"
    if status == 412:
        return "somebody else changed the repo meanwhile; run again"
    if status == 429:
        return f"the Hub limits the rate of requests, {attempts} attempts were made; wait some minutes, or log in"
    if status >= 500:
        return f"the Hub fails with status {status} ({said}), {attempts} attempts were made; run again later"
    if status:
        return f"the Hub refuses with status {status} ({said}); nothing more was tried"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "no room left on the disk of the cache; make room, or set HF_HOME to another disk"
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return f"the cache cannot be written ({error.filename}); set HF_HOME to a folder of your own"
    if "HTTPError" in names or isinstance(error, (ConnectionError, TimeoutError)):
        return f"the Hub cannot be reached, the connection failed ({said}); check the network, or set HF_HUB_OFFLINE=1"
    return ""


def _unforeseen(error: BaseException) -> str:
    return f"the Hub's client failed ({type(error).__name__}: {_said(error)}); see SHARDCONV_DEBUG=1"


def _said(error: BaseException) -> str:
    """The server's own words, else the first line of the client's."""
    text = getattr(error, "server_message", None) or str(error).strip() or type(error).__name__
    return str(text).strip().splitlines()[0].rstrip(".")
