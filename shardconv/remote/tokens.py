"""The token that the Hub is asked with, and how it is kept out of everything that is said."""

from __future__ import annotations

import base64
import contextlib
import html
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

from ..errors import UsageError

STARS = "***"
_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_ID_TOKEN")
_SHORTEST = 4  # characters; anything shorter is no secret, and would blot out half a sentence
_SHORTEST_CODED = 6  # ... of what is looked for in base64 too
# What looks like a token, known to us or not, and a password in an address.
_LOOKS_SECRET = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}\b|(?i:bearer )[^\s'\"\\]+|(?<=://)[^/\s'\"@]+(?=@)")
_QUERY = re.compile(r"(\bhttps?://[^\s'\"<>?]+\?)[^\s'\"<>]+")  # addresses of storage hosts are signed in theirs


def usable_token(token: str | bool | None) -> str | bool | None:
    """A token as the client takes it: what a file or a variable has around it is taken off, an empty one is none given.

    Raises `UsageError`, without quoting it, when it could not be sent.
    """
    if token is None or isinstance(token, bool):
        return token
    if not isinstance(token, str):
        raise UsageError(f"token: expected text, True, False or None, found {type(token).__name__}; give its text")
    stripped = token.strip()
    if not _can_be_sent(stripped):
        raise UsageError("token: expected printable ASCII without spaces, found something else in it; copy it again")
    return stripped or None


def _can_be_sent(token: str) -> bool:
    return all("!" <= sign <= "~" for sign in token)


def login_issue(headers: Callable[[], Mapping[str, str]]) -> str:
    """Why no request can be made here at all, whose headers the client makes by `headers`; "" when one can."""
    try:
        sent = headers().get("authorization", "").removeprefix("Bearer ")
    except Exception as error:  # of the client, of the system, or of whatever service gives tokens
        if type(error).__name__ == "LocalTokenNotFoundError":
            return "the Hub knows no such login (token=True, and none is saved here); log in: hf auth login"
        why = type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            why = f"{error.filename}: {error.strerror}"
        return f"the saved token cannot be had ({why}); log in: hf auth login, or set HF_TOKEN"
    if not _can_be_sent(sent):
        return "the saved token, or HF_TOKEN, holds what no token does; copy it again: hf auth login"
    return ""


def known_secrets(token: str | bool | None, saved: Callable[[], str | None], path: str) -> tuple[str, ...]:
    """Every token that this process could come to tell: the one given, those of the environment, what the client gives
    as `saved`, and what stands in the file `path`, where it keeps it."""
    found = [token if isinstance(token, str) else None, *map(os.environ.get, _VARIABLES)]
    with contextlib.suppress(Exception):  # that it cannot be had is the request's to tell
        found.append(saved())
    with contextlib.suppress(OSError, ValueError):
        found.append(Path(path).read_text())
    return tuple(each for each in found if each)


def without_secrets(text: str, secrets: tuple[str, ...]) -> str:
    """`text` with each of `secrets` blotted out in every form in which a library may print it, and whatever else looks
    like a token, a password or a signed address."""
    words = {word for secret in secrets for word in {secret, secret.strip(), *secret.split()}}
    words = {word for word in words if len(word) >= _SHORTEST}
    forms = {form for word in words for form in _forms(word)}
    if forms:  # one that holds another one first
        text = re.sub("|".join(map(re.escape, sorted(forms, key=len, reverse=True))), STARS, text, flags=re.IGNORECASE)
    for core in {core for word in words for core in _coded(word)}:
        text = re.sub(rf"[\w+/-]*{re.escape(core)}[\w+/=-]*", STARS, text)
    return _QUERY.sub(rf"\1{STARS}", _LOOKS_SECRET.sub(STARS, text))


def _forms(secret: str) -> Iterator[str]:
    """As it is, and escaped as Python, JSON, addresses and pages do."""
    yield secret
    yield repr(secret)[1:-1]
    yield ascii(secret)[1:-1]
    yield json.dumps(secret)[1:-1]
    yield html.escape(secret)
    yield quote(secret)
    yield quote(secret, safe="")
    yield quote_plus(secret)
    yield secret.encode("utf-8", "surrogateescape").hex()


def _coded(secret: str) -> Iterator[str]:
    """Of its base64 what is there whatever stands before and behind it in what was encoded."""
    raw = secret.encode("utf-8", "surrogateescape")
    if len(raw) < _SHORTEST_CODED:
        return
    for before in range(3):  # bytes; the fourth would be the first again
        whole = base64.b64encode(bytes(before) + raw).decode()
        core = whole[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6]
        yield core
        yield core.replace("+", "-").replace("/", "_")
