"""Which library a model is of, and what that library says: nobody else asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from .base import ModelLibrary
from .diffusers import Diffusers
from .transformers import Transformers

LIBRARIES: tuple[ModelLibrary, ...] = (Diffusers(), Transformers())


def library_named(name: str) -> ModelLibrary | None:
    """The library that `model_index.json` calls so; None for one whose models are never cut."""
    return next((library for library in LIBRARIES if library.name == name), None)


def library_for(config: Mapping[str, Any]) -> ModelLibrary:
    """The library that a component with this config is of, told without importing any."""
    is_transformers = "architectures" in config and "_diffusers_version" not in config
    return next(library for library in LIBRARIES if (library.name == "transformers") == is_transformers)


def library_of(cls: Any) -> ModelLibrary:
    """The library of a class; that of a class which somebody derived is the first."""
    return library_named(cls.__module__.partition(".")[0]) or LIBRARIES[0]


def model_class(name: str, config: Mapping[str, Any] | None = None) -> Any:
    """The model class that a config with `_class_name` `name` stands for: the one of that name, or of what its library
    has renamed such a model to. Raises `CheckpointError`."""
    config = config or {}
    likely = library_for(config)
    for library in (likely, *(library for library in LIBRARIES if library is not likely)):
        if library.find(name) is not None:
            return library.current(name, config)
    library = likely
    written_by = library.written_by(config)
    version = f" (the config was written by {library.name} {written_by})" if written_by else ""
    raise CheckpointError(
        f"{name}: expected a model class of {library.name}, not one in the installed {library.name} "
        f"{library.version()}{version}; upgrade {library.name}, or check _class_name in config.json"
    )


def renamed(name: str) -> str:
    """What to give instead of a class name that is outdated; "" for any other name."""
    return next(filter(None, (library.renamed(name) for library in LIBRARIES)), "")


def version_of(cls: Any) -> str:
    """Name and version of the library of a class."""
    library = library_of(cls)
    return f"{library.name} {library.version()}"
