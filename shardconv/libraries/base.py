"""What must be known of a model library."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

# To be held while a library imports, builds or loads: lazy imports of two threads can meet half-imported modules; the
# default dtype, and what building patches into torch, are the whole process's.
BUILDING = threading.RLock()


class ModelLibrary(Protocol):
    """A library whose model classes are looked up by name; no code from a checkpoint is ever run."""

    @property
    def name(self) -> str:
        """As `model_index.json` and manifests write it: the top-level package of its classes."""

    def version(self) -> str:
        """Of the installed one."""

    def find(self, name: str) -> Any:
        """Its model class `name`; None when it has none. Raises `CheckpointError` when it fails to import it."""

    def current(self, name: str, config: Mapping[str, Any]) -> Any:
        """The class that a model published as `name`, which it has, with this config is of now."""

    def renamed(self, name: str) -> str:
        """What to give instead of a class name under which models were published that are of other classes now; "" for
        any other name."""

    def written_by(self, config: Mapping[str, Any]) -> str | None:
        """The version of the library that a config says it was written by."""

    def build(self, cls: Any, config: Mapping[str, Any]) -> Any:
        """A model of `cls`; raises whatever its constructor raises."""

    def own_plan(self, cls: Any) -> object:
        """The plan that the class itself carries, as `parse_plan` takes it; None or empty when it has none."""

    def keep_in_fp32(self, cls: Any) -> tuple[str, ...]:
        """Names of modules that the class wants in fp32 whatever dtype is asked for."""

    def ignored_patterns(self, cls: Any) -> tuple[str, ...]:
        """Regular expressions of unexpected tensors that the class tells loaders to ignore."""
