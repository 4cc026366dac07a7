"""Progress on a terminal: bytes, rate, time left. Nothing in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NewProgress = Callable[[str, int], Callable[[int], None]]  # (what, total bytes) -> called with bytes just dealt with


@contextmanager
def progress_bars(quiet: bool) -> Iterator[NewProgress]:
    """Hands out progress bars and closes them; silent ones when `quiet` or when stderr is no terminal."""
    bars: list[Any] = []

    def new(what: str, total: int) -> Callable[[int], None]:
        from tqdm import tqdm

        bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1000, file=sys.stderr)
        bars.append(bar)
        return lambda nbytes: bar.update(nbytes) and None

    def silent(what: str, total: int) -> Callable[[int], None]:
        return lambda nbytes: None

    try:
        yield silent if quiet or not sys.stderr.isatty() else new
    finally:
        for bar in bars:
            bar.close()
