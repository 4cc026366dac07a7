"""How the progress of long work is told."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int], None]  # called with a number of source bytes just dealt with
NewProgress = Callable[[str, int], Progress]  # (what, total bytes) -> called with bytes just dealt with
