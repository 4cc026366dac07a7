"""What a checkpoint has and its model lacks, and the other way round."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..format.weights import shorten
from .refusals import ORIGINAL_KEY, QUANTIZED_KEY

_WRAPPERS = ("module.", "_orig_mod.", "model.")


def match_names(stored: Collection[str], expected: Mapping[str, object], ignore: Sequence[str]) -> list[str]:
    """Issues where a checkpoint, whose tensors `stored` names, lacks one of the model or carries quantizer state.

    `expected` are the names of the model that must be stored; `ignore` are the class's own
    `_keys_to_ignore_on_load_unexpected` patterns.
    """
    missing = [name for name in expected if name not in stored]
    unexpected = unexpected_names(stored, expected, ignore)
    original = [name for name in unexpected if ORIGINAL_KEY.match(name)]
    if original:
        return [
            f"{original[0]}: an original-format key ({len(original)} in all), not diffusers layout; convert it first: "
            "from_single_file(...) then save_pretrained(...)"
        ]
    issues = [
        f"{name}: the model has it, the checkpoint does not; fetch or save the checkpoint again" for name in missing
    ]
    for name in unexpected:
        if QUANTIZED_KEY.search(name):
            issues.append(
                f"{name}: looks like quantizer state, the model has no such tensor; convert an unquantized one"
            )
    if missing and unexpected:
        issues.append(f"the checkpoint has instead: {shorten(unexpected)}; are config and weights of one model?")
    wrapper = next((w for w in _WRAPPERS if missing and all(name.startswith(w) for name in unexpected)), None)
    if wrapper and unexpected:
        issues.append(f"{unexpected[0]}: every name starts with {wrapper!r}; save the model without its wrapper")
    return issues


def unexpected_names(stored: Iterable[str], expected: Iterable[str], ignore: Sequence[str]) -> list[str]:
    """Tensors that the model does not have and its class does not tell to ignore, in source order."""
    known = set(expected)
    return [name for name in stored if name not in known and not any(re.search(pattern, name) for pattern in ignore)]
