"""Wan and what was made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .draw import Case, Config, Draw, Inputs, values

if TYPE_CHECKING:
    import torch


def wan(c: Config, d: Draw) -> Inputs:
    image = getattr(c, "image_dim", None)
    # with images, all but the last 512 tokens of the context are taken for the image's
    text = 512 if image and getattr(c, "added_kv_proj_dim", None) else 6
    given = {
        "hidden_states": d.normal(1, c.in_channels or 2 * c.latent_channels + 4, 2, 8, 8),
        "timestep": values(500),
        "encoder_hidden_states": d.normal(1, text, c.text_dim),
    }
    if image:
        images, tokens = (2, c.pos_embed_seq_len // 2) if getattr(c, "pos_embed_seq_len", None) else (1, 5)
        given["encoder_hidden_states_image"] = d.normal(images, tokens, image)
    return given | ({"fps": [1]} if getattr(c, "inject_sample_info", False) else {})


def wan_vace(c: Config, d: Draw) -> Inputs:
    return wan(c, d) | {
        "control_hidden_states": d.normal(1, c.vace_in_channels, 2, 8, 8),
        "control_hidden_states_scale": values(*([0.75] * len(c.vace_layers))),
    }


def wan_animate(c: Config, d: Draw) -> Inputs:
    size = c.motion_encoder_size
    return wan(c, d) | {
        "hidden_states": d.normal(1, c.in_channels or 2 * c.latent_channels + 4, 3, 8, 8),
        "pose_hidden_states": d.normal(1, c.latent_channels, 2, 8, 8),
        "face_pixel_values": d.normal(1, 3, 5, size, size),
    }


def wan_animate_2(c: Config, d: Draw) -> Inputs:
    import torch
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": [d.normal(c.out_dim, 2, 4, 4)],
        "timestep": values(1),
        "encoder_hidden_states": [d.normal(8, c.text_dim)],
        "condition_latents": [d.normal(c.in_dim - c.out_dim, 2, 4, 4)],
        "encoder_hidden_states_image": d.normal(1, 4, 1280),
        "kv_cache": WanAnimate2KVCache(c.num_layers),
        "kv_cache_mode": "extract",
        "seq_len": 8,
        "offset_grid_sizes": torch.tensor([[2, 2, 2]]),
    }


def anyflow(c: Config, d: Draw) -> Inputs:
    given = wan(c, d)
    return given | {
        "hidden_states": d.normal(1, 2, c.in_channels, 8, 8),
        "timestep": values(500, 500)[None],
        "r_timestep": values(250, 250)[None],
    }


def anyflow_far(c: Config, d: Draw) -> Inputs:
    return anyflow(c, d) | {
        "hidden_states": d.normal(1, 4, c.in_channels, 8, 8),
        "timestep": values(500, 500, 500, 500)[None],
        "r_timestep": values(250, 250, 250, 250)[None],
        "chunk_partition": [2, 2],
    }


def helios(c: Config, d: Draw) -> Inputs:
    def history(frames: int) -> torch.Tensor:
        return d.normal(1, c.in_channels, frames, 16, 16)

    given = wan(c, d) | {"hidden_states": history(2), "indices_hidden_states": values(6, 7)[None]}
    if not c.has_multi_term_memory_patch:
        return given
    return given | {
        "indices_latents_history_short": values(5)[None],
        "indices_latents_history_mid": values(4)[None],
        "indices_latents_history_long": values(0, 1, 2, 3)[None],
        "latents_history_short": history(1),
        "latents_history_mid": history(1),
        "latents_history_long": history(4),
    }


# fmt: off
WAN = {
    "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 32, "ffn_dim": 72, "num_layers": 2, "rope_max_seq_len": 32,
}
WAN_I2V = WAN | {"image_dim": 20, "added_kv_proj_dim": 48}

CASES: Mapping[str, Case] = {
    "WanTransformer3DModel": Case(WAN_I2V, wan),
    "WanVACETransformer3DModel": Case(WAN | {"vace_layers": [0, 1], "vace_in_channels": 8}, wan_vace),
    "WanAnimateTransformer3DModel": Case(
        WAN_I2V
        | {
            "in_channels": 12, "latent_channels": 4,
            "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
            "motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16,
            "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 4, "inject_face_latents_blocks": 2,
        },
        wan_animate,
    ),
    "WanAnimate2Transformer3DModel": Case(
        {
            "text_len": 16, "in_dim": 12, "dim": 128, "ffn_dim": 72, "freq_dim": 32, "text_dim": 20, "out_dim": 4,
            "num_heads": 4, "num_layers": 2,
        },
        wan_animate_2,
    ),
    "ChronoEditTransformer3DModel": Case(WAN_I2V | {"rope_temporal_skip_len": 2}, wan),
    "SkyReelsV2Transformer3DModel": Case(WAN_I2V, wan),
    "AnyFlowTransformer3DModel": Case(WAN, anyflow),
    "AnyFlowFARTransformer3DModel": Case(WAN, anyflow_far),
    "HeliosTransformer3DModel": Case(
        {key: value for key, value in WAN.items() if key != "rope_max_seq_len"}
        | {"rope_dim": (4, 4, 4), "is_amplify_history": True},
        helios,
    ),
}
# fmt: on
