"""transformers: text encoders. Its classes are looked up by name, no code of a checkpoint is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import BUILDING, looked_up


class Transformers:
    """See `ModelLibrary`."""

    name = "transformers"
    weight_stem = "model"
    prefers_single = True
    has_plans = False
    refused: Mapping[str, str] = {
        "save_pretrained": "be saved",
        "push_to_hub": "be pushed",
        "resize_token_embeddings": "have its vocabulary changed",
        "add_adapter": "have an adapter added; merge it before sharding",
        "load_adapter": "have an adapter loaded; merge it before sharding",
    }

    def version(self) -> str:
        """See `ModelLibrary`."""
        with BUILDING:
            try:
                import transformers
            except ImportError:
                return "(none is installed)"

        return str(transformers.__version__)

    def find(self, name: str) -> Any:
        """See `ModelLibrary`."""
        with BUILDING:
            try:
                import transformers
            except ImportError:
                return None
            return looked_up(transformers, name, transformers.PreTrainedModel)

    def current(self, name: str, config: Mapping[str, Any]) -> Any:
        """See `ModelLibrary`; it renames no classes."""
        return self.find(name)

    def renamed(self, name: str) -> str:
        """See `ModelLibrary`."""
        return ""

    def written_by(self, config: Mapping[str, Any]) -> str | None:
        """See `ModelLibrary`."""
        version = config.get("transformers_version")
        return str(version) if version else None

    def build(self, cls: Any, config: Mapping[str, Any]) -> Any:
        """See `ModelLibrary`."""
        public = {key: value for key, value in config.items() if not key.startswith("_")}
        return cls(cls.config_class.from_dict(public))

    def own_plan(self, cls: Any) -> object:
        """None: its plans are of other styles, and of some classes only."""
        return None

    def keep_in_fp32(self, cls: Any, dtype: str) -> tuple[str, ...]:
        """See `ModelLibrary`: `_keep_in_fp32_modules` under fp16 alone, the strict ones under bf16 too."""
        strict = tuple(getattr(cls, "_keep_in_fp32_modules_strict", None) or ())
        return (*(getattr(cls, "_keep_in_fp32_modules", None) or ()), *strict) if dtype == "F16" else strict

    def ignored_patterns(self, cls: Any) -> tuple[str, ...]:
        """See `ModelLibrary`; buffers that its classes compute are ignored whatever the class."""
        patterns = tuple(getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ())
        return (*patterns, r"rotary_emb\.inv_freq$", r"position_ids$")

    def note(self, model: Any, path: str, dtype: Any) -> None:
        """See `ModelLibrary`."""
        model.name_or_path = model.config._name_or_path = path
        model.config.dtype = dtype or model.dtype

    def mark_sharded(self, model: Any, empty: Any, tp: int) -> None:
        """It knows sharded models by other marks than ours, which would have it do more than refuse."""
