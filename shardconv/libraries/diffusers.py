"""The model class a config names, and its skeleton: parameters on the meta device, everything else real.

The one place where the converter needs torch and diffusers. No code from a checkpoint is ever run: a class is looked up
by name among diffusers' own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError

if TYPE_CHECKING:
    import torch


# To be held while diffusers imports, builds or loads: its lazy imports of two threads can meet half-imported modules;
# the default dtype, and what building patches into torch, are the whole process's.
DIFFUSERS = threading.RLock()


def model_class(name: str, config: Mapping[str, Any] | None = None) -> Any:
    """diffusers' model class that a config with `_class_name` `name` stands for: the one of that name, or of what
    diffusers has renamed such a model to. Raises `CheckpointError`."""
    config = config or {}
    cls = _lookup(name)
    if cls is not None:
        return _lookup(_renamings(name).get(str(config.get("norm_type")), "")) or cls
    import diffusers

    written_by = config.get("_diffusers_version")
    version = f" (the config was written by diffusers {written_by})" if written_by else ""
    raise CheckpointError(
        f"{name}: expected a model class of diffusers, not one in the installed diffusers {diffusers.__version__}"
        f"{version}; upgrade diffusers, or check _class_name in config.json"
    )


def renamed(name: str) -> str:
    """What to give instead of a class name under which models were published that are of other classes now; "" for any
    other name."""
    names = sorted(_renamings(name).values())
    return f"is {' or '.join(names)} now, as its config says; give one of them, or a component folder" if names else ""


def _renamings(name: str) -> Mapping[str, str]:
    """`norm_type` of a config -> class that its model is of now, for models published as `name`."""
    with DIFFUSERS:
        from diffusers.models import model_loading_utils  # it has no public way to ask

    found: Mapping[str, str] = getattr(model_loading_utils, "_CLASS_REMAPPING_DICT", {}).get(name, {})
    return found


def _lookup(name: str) -> Any:
    """diffusers' model class `name`; None when it has none. Raises `CheckpointError` when it fails to import it."""
    with DIFFUSERS:
        import diffusers

        try:
            cls = getattr(diffusers, name) if name.isidentifier() else None
        except Exception as error:  # whatever importing raises, in whatever package that the class needs
            if name not in dir(diffusers):
                return None
            why = error.__cause__ or error
            raise CheckpointError(
                f"{name}: diffusers {diffusers.__version__} has it but fails to import it ({type(why).__name__}: "
                f"{why}); install or upgrade what it asks for"
            ) from error
        return cls if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin) else None


def skeleton(cls: Any, config: Mapping[str, Any], dtype: torch.dtype | None = None) -> Any:
    """A model of `cls` with every parameter on meta, costing no memory for weights, in eval mode.

    Buffers and plain-attribute tables (QwenImage's `pos_freqs`) are computed for real, under the default `dtype` as
    diffusers does. Raises `CheckpointError` when `config` does not build the class.
    """
    import torch

    with DIFFUSERS:
        previous = torch.get_default_dtype()
        try:
            if dtype is not None:
                torch.set_default_dtype(dtype)
            with _parameters_on_meta():
                model = cls.from_config(dict(config))
        except Exception as error:  # the constructor is diffusers' own code and raises whatever a bad config causes
            raise CheckpointError(
                f"config.json: does not build a {cls.__name__} ({type(error).__name__}: {error}); fetch it again"
            ) from error
        finally:
            torch.set_default_dtype(previous)
    return model.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    import torch

    register, builder = torch.nn.Module.register_parameter, threading.get_ident()

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        # A parameter already on meta is kept as it is, so that tied ones stay one object.
        # What another thread builds meanwhile is none of ours.
        if threading.get_ident() == builder and parameter is not None and parameter.device.type != "meta":
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def keep_in_fp32(cls: Any) -> tuple[str, ...]:
    """Module names that the class wants in fp32 whatever dtype is asked for (`_keep_in_fp32_modules`)."""
    names = getattr(cls, "_keep_in_fp32_modules", None) or ()
    return (names,) if isinstance(names, str) else tuple(names)


def kept_in_fp32(parameter: str, modules: Sequence[str]) -> bool:
    """diffusers' own test: one of `modules` is a whole component of the dotted parameter name."""
    return not set(modules).isdisjoint(parameter.split("."))


def ignored_patterns(cls: Any) -> tuple[str, ...]:
    """Regular expressions of unexpected tensors that the class tells loaders to ignore."""
    patterns = getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def stored_tensors(model: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter and persistent buffer, in the model's own order."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}


def tied_names(model: Any) -> list[tuple[str, ...]]:
    """Groups of two or more names that are one parameter object."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]
