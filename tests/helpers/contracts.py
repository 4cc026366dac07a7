"""A name that another library does not promise, and what of ours stands on it: to be asserted, so that an upgrade fails
with the name."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Name:
    """`path` is a module and attributes of it, dotted; `takes` are parameters that we pass; `user` a file of ours."""

    path: str
    user: str
    takes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.path

    def check(self) -> None:
        """Fails with the name and who uses it, when the name is gone, takes other parameters or nobody uses it."""
        leaf = self.path.rpartition(".")[2]
        assert leaf in Path(ROOT, self.user).read_text(), f"{self.user} does not use {self.path} any more: remove it"
        missing = [name for name in self.takes if name not in parameters(found(self.path, self.user))]
        assert not missing, f"{self.path} takes no {', '.join(missing)} any more; {self.user} passes it"


def found(path: str, user: str) -> Any:
    """What stands at `path`."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for name in parts[length:]:
            assert hasattr(value, name), f"{path} is gone; {user} uses it"
            value = getattr(value, name)
        return value
    raise AssertionError(f"{path} is gone; {user} uses it")


def parameters(function: Any) -> list[str]:
    """Names of what a function, a class or an operator of torch takes; of one that takes any keyword, what it says."""
    if hasattr(function, "default"):  # an operator
        return [each.name for each in function.default._schema.arguments]
    return list(inspect.signature(function).parameters)
