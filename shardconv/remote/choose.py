"""From what people write to a store: one rule, for the converter and for the loader."""

from __future__ import annotations

import re

from .store import Store


def is_store_name(text: str) -> bool:
    """Whether a text that is no path here can name a store: a repo of the Hub, `org/name`."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text))


def store_named(
    name: str,
    *,
    token: str | bool | None = None,
    cache_dir: str | None = None,
    local_files_only: bool = False,
    subject: str = "",
) -> Store:
    """The store of that name; `subject` is what messages call it instead."""
    from .hub import Repo

    return Repo(name, token, cache_dir, local_files_only, subject)
