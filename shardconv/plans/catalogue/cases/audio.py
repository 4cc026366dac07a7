"""Audio models."""

from __future__ import annotations

from collections.abc import Mapping

from .draw import Case, Config, Draw, Inputs, text_mask, values


def minimax_music3(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(1, c.in_channels, 12),
        "timestep": values(0.5),
        "encoder_hidden_states": d.normal(1, 12, c.condition_dim),
    }


def ace_step(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(2, 12, c.audio_acoustic_hidden_dim),
        "timestep": values(0.75, 0.25),
        "timestep_r": values(0.5, 0.25),
        "encoder_hidden_states": d.normal(2, 6, c.encoder_hidden_size or c.hidden_size),
        "context_latents": d.normal(2, 12, c.in_channels - c.audio_acoustic_hidden_dim),
    }


def longcat_audio(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(2, 12, c.latent_dim),
        "encoder_hidden_states": d.normal(2, 6, c.dit_text_dim),
        "encoder_attention_mask": text_mask(6, 2),
        "timestep": values(0.75, 0.25),
        "attention_mask": text_mask(12, 2),
        "latent_cond": d.normal(2, 12, c.latent_dim),
    }


def stable_audio3(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(1, c.io_channels, 12),
        "timestep": values(0.5),
        "encoder_hidden_states": d.normal(1, 6, c.cond_token_dim),
        "global_hidden_states": d.normal(1, c.global_cond_dim),
        "local_add_cond": d.normal(1, c.local_add_cond_dim, 12) if c.local_add_cond_dim else None,
    }


# fmt: off

CASES: Mapping[str, Case] = {
    "MiniMaxMusic3Transformer1DModel": Case(
        {
            "in_channels": 8, "condition_dim": 12, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8,
            "ff_inner_dim": 40, "rotary_dim": 4, "fourier_embedding_dim": 16,
        },
        minimax_music3,
    ),
    "AceStepTransformer1DModel": Case(
        {
            "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 8, "in_channels": 24, "audio_acoustic_hidden_dim": 8,
            "sliding_window": 4,
        },
        ace_step,
    ),
    "LongCatAudioDiTTransformer": Case(
        {"dit_dim": 64, "dit_depth": 2, "dit_heads": 4, "dit_text_dim": 20, "latent_dim": 8}, longcat_audio
    ),
    "StableAudio3DiTModel": Case(
        {
            "io_channels": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "cond_token_dim": 20, "global_cond_dim": 12,
            "local_add_cond_dim": 6, "timestep_features_dim": 16, "num_memory_tokens": 3,
        },
        stable_audio3,
    ),
}
# fmt: on
