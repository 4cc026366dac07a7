"""Text encoders."""

from __future__ import annotations

from collections.abc import Mapping

from .draw import Case, Config, Draw, Inputs, text_mask


def tokens(c: Config, d: Draw) -> Inputs:
    return {"input_ids": d.below(c.vocab_size, 2, 7), "attention_mask": text_mask(7, 2, dtype="int64")}


# fmt: off
T5 = {
    "vocab_size": 96, "d_model": 40, "d_kv": 12, "d_ff": 72, "num_layers": 2, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
}

CASES: Mapping[str, Case] = {
    "T5EncoderModel": Case(T5, tokens),
    "UMT5EncoderModel": Case(T5, tokens),
}
# fmt: on
