"""What must be known of a model library."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

from ..errors import CheckpointError

# To be held while a library imports, builds or loads: lazy imports of two threads can meet half-imported modules; the
# default dtype, and what building patches into torch, are the whole process's.
BUILDING = threading.RLock()


class ModelLibrary(Protocol):
    """A library whose model classes are looked up by name; no code from a checkpoint is ever run."""

    @property
    def name(self) -> str:
        """As `model_index.json` and manifests write it: the top-level package of its classes."""

    @property
    def weight_stem(self) -> str:
        """What the names of its weight files begin with."""

    @property
    def prefers_single(self) -> bool:
        """Whether a single weight file comes before an index beside it."""

    @property
    def has_plans(self) -> bool:
        """Whether its classes may carry plans of their own; else the catalogue alone has them."""

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

    def keep_in_fp32(self, cls: Any, dtype: str) -> tuple[str, ...]:
        """Names of modules that the class wants in fp32 when `dtype` (a name of the format) is asked for."""

    def ignored_patterns(self, cls: Any) -> tuple[str, ...]:
        """Regular expressions of unexpected tensors that the class tells loaders to ignore."""

    def note(self, model: Any, path: str, dtype: Any) -> None:
        """Have a model know where it was loaded from, and in which dtype of torch, as its own loading does."""

    def mark_sharded(self, model: Any, empty: Any, tp: int) -> None:
        """Have the library's own refusals for a sharded model apply to `model`, and to an `empty` one of its class."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Methods of its models -> what a sharded one cannot, as the library itself does not refuse it."""


def looked_up(package: ModuleType, name: str, base: type) -> Any:
    """The class `name` of a library that imports its classes late, if it is one of `base`; None when there is none.

    Raises `CheckpointError` when the library has it but fails to import it. To be called with `BUILDING` held.
    """
    try:
        cls = getattr(package, name) if name.isidentifier() else None
    except Exception as error:  # whatever importing raises, in whatever package that the class needs
        if name not in dir(package):
            return None
        why = error.__cause__ or error
        raise CheckpointError(
            f"{name}: {package.__name__} {package.__version__} has it but fails to import it ({type(why).__name__}: "
            f"{why}); install or upgrade what it asks for"
        ) from error
    return cls if isinstance(cls, type) and issubclass(cls, base) else None
