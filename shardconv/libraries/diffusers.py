"""diffusers: its model classes and what they say of themselves. Every name of it that is private, or that a version
brought, and that the converter needs is here (`tests/contracts` holds them against the installed one)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import BUILDING, looked_up


class Diffusers:
    """See `ModelLibrary`."""

    name = "diffusers"
    weight_stem = "diffusion_pytorch_model"
    prefers_single = False
    has_plans = True
    # What diffusers 0.42.1 does not check: it looks where it loads adapters, and makes a repo before it saves.
    refused: Mapping[str, str] = {
        "add_adapter": "have an adapter added; fuse it before sharding",
        "push_to_hub": "be pushed",
        "_load_ip_adapter_weights": "have an IP-Adapter, whose attention processors hold projections as wide as all "
        "heads; run that model unsharded",
    }

    def version(self) -> str:
        """See `ModelLibrary`."""
        with BUILDING:
            import diffusers

        return str(diffusers.__version__)

    def find(self, name: str) -> Any:
        """See `ModelLibrary`."""
        with BUILDING:
            import diffusers

            return looked_up(diffusers, name, diffusers.ModelMixin)

    def current(self, name: str, config: Mapping[str, Any]) -> Any:
        """See `ModelLibrary`."""
        return self.find(_renamings(name).get(str(config.get("norm_type")), "")) or self.find(name)

    def renamed(self, name: str) -> str:
        """See `ModelLibrary`."""
        names = sorted(_renamings(name).values())
        return (
            f"is {' or '.join(names)} now, as its config says; give one of them, or a component folder" if names else ""
        )

    def written_by(self, config: Mapping[str, Any]) -> str | None:
        """See `ModelLibrary`."""
        version = config.get("_diffusers_version")
        return str(version) if version else None

    def build(self, cls: Any, config: Mapping[str, Any]) -> Any:
        """See `ModelLibrary`."""
        return cls.from_config(dict(config))

    def own_plan(self, cls: Any) -> object:
        """See `ModelLibrary`."""
        return getattr(cls, "_tp_plan", None)

    def keep_in_fp32(self, cls: Any, dtype: str) -> tuple[str, ...]:
        """See `ModelLibrary`: whatever the dtype. A class may name one module by a string."""
        names = getattr(cls, "_keep_in_fp32_modules", None) or ()
        return (names,) if isinstance(names, str) else tuple(names)

    def ignored_patterns(self, cls: Any) -> tuple[str, ...]:
        """See `ModelLibrary`; a class may name one pattern by a string."""
        patterns = getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()
        return (patterns,) if isinstance(patterns, str) else tuple(patterns)

    def note(self, model: Any, path: str, dtype: Any) -> None:
        """See `ModelLibrary`."""
        model.register_to_config(_name_or_path=path)

    def mark_sharded(self, model: Any, empty: Any, tp: int) -> None:
        """See `ModelLibrary`."""
        try:
            from diffusers import ParallelConfig, TensorParallelConfig
        except ImportError:
            from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig

        model._parallel_config = empty._parallel_config = ParallelConfig(
            tensor_parallel_config=TensorParallelConfig(tp_degree=tp)
        )


def _renamings(name: str) -> Mapping[str, str]:
    """`norm_type` of a config -> class that its model is of now, for models published as `name`."""
    with BUILDING:
        from diffusers.models import model_loading_utils  # it has no public way to ask

    found: Mapping[str, str] = getattr(model_loading_utils, "_CLASS_REMAPPING_DICT", {}).get(name, {})
    return found
