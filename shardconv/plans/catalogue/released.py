"""Configurations of released models, typed in: what degrees and sizes are worked out from, on the meta device.

A config holds what differs from the class's defaults in the diffusers version that the catalogue was checked with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Released:
    """One model that people run."""

    model_class: str
    parameters: float  # in 10^9, as published or counted, to two digits
    config: Mapping[str, Any] = field(default_factory=dict)


_WAN_I2V = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
_SD35 = {"joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm"}

# fmt: off
RELEASED: Mapping[str, Released] = {
    "FLUX.1-dev": Released("FluxTransformer2DModel", 11.90, {"guidance_embeds": True}),
    "FLUX.2-dev": Released("Flux2Transformer2DModel", 32.22),
    "Qwen-Image": Released("QwenImageTransformer2DModel", 20.43),
    "Wan2.1-T2V-14B": Released("WanTransformer3DModel", 14.29),
    "Wan2.1-T2V-1.3B": Released(
        "WanTransformer3DModel", 1.42, {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
    ),
    "Wan2.1-I2V-14B": Released("WanTransformer3DModel", 16.39, _WAN_I2V),
    "Wan2.2-TI2V-5B": Released(
        "WanTransformer3DModel", 5.00,
        {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48},
    ),
    "Wan2.1-VACE-14B": Released("WanVACETransformer3DModel", 17.34),
    "Wan2.2-Animate-14B": Released("WanAnimateTransformer3DModel", 17.27, {"added_kv_proj_dim": 5120}),
    "SkyReels-V2-14B": Released(
        "SkyReelsV2Transformer3DModel", 14.29, {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
    ),
    "HunyuanVideo": Released("HunyuanVideoTransformer3DModel", 12.82),
    "HunyuanVideo-1.5": Released("HunyuanVideo15Transformer3DModel", 8.33),
    "HunyuanImage-2.1": Released("HunyuanImageTransformer2DModel", 17.43, {"text_embed_2_dim": 1472}),
    "HunyuanDiT-v1.2": Released(
        "HunyuanDiT2DModel", 1.44,
        {"in_channels": 4, "patch_size": 2, "hidden_size": 1408, "num_layers": 40, "sample_size": 128,
         "use_style_cond_and_image_meta_size": False},
    ),
    "LTX-Video-2B": Released("LTXVideoTransformer3DModel", 1.92),
    "LTX-Video-13B": Released(
        "LTXVideoTransformer3DModel", 13.04,
        {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
    ),
    "LTX-2-19B": Released("LTX2VideoTransformer3DModel", 18.88),
    "CogVideoX-5b": Released(
        "CogVideoXTransformer3DModel", 5.57,
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
    ),
    "CogVideoX-2b": Released("CogVideoXTransformer3DModel", 1.69),
    "CogView4-6B": Released(
        "CogView4Transformer2DModel", 6.37,
        {"num_attention_heads": 32, "attention_head_dim": 128, "num_layers": 28},
    ),
    "stable-diffusion-3.5-large": Released(
        "SD3Transformer2DModel", 8.06,
        _SD35 | {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
                 "pos_embed_max_size": 192},
    ),
    "stable-diffusion-3.5-medium": Released(
        "SD3Transformer2DModel", 2.24,
        _SD35 | {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536,
                 "pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13))},
    ),
    "AuraFlow": Released("AuraFlowTransformer2DModel", 6.83),
    "Chroma1-HD": Released("ChromaTransformer2DModel", 8.90),
    "Z-Image": Released("ZImageTransformer2DModel", 6.15),
    "Lumina-Image-2.0": Released("Lumina2Transformer2DModel", 2.61, {"cap_feat_dim": 2304}),
    "Lumina-Next-SFT": Released(
        "LuminaNextDiT2DModel", 1.75, {"num_layers": 24, "num_kv_heads": 8, "ffn_dim_multiplier": 1.0}
    ),
    "HiDream-I1-Full": Released(
        "HiDreamImageTransformer2DModel", 17.11,
        {"patch_size": 2, "in_channels": 16, "out_channels": 16, "caption_channels": [4096, 4096],
         "llama_layers": [*range(32), *[31] * 16]},
    ),
    "mochi-1-preview": Released("MochiTransformer3DModel", 10.03),
    "Cosmos-1.0-14B": Released(
        "CosmosTransformer3DModel", 14.27, {"num_attention_heads": 40, "num_layers": 36}
    ),
    "Sana-1.6B": Released("SanaTransformer2DModel", 1.60),
    "PixArt-Sigma-XL": Released("PixArtTransformer2DModel", 0.61, {"caption_channels": 4096}),
    "OmniGen-v1": Released(
        "OmniGenTransformer2DModel", 3.76,
        {"rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48}},
    ),
    "EasyAnimateV5.1-12b": Released(
        "EasyAnimateTransformer3DModel", 11.80, {"in_channels": 16, "out_channels": 16, "patch_size": 2}
    ),
    "Latte-1": Released(
        "LatteTransformer3DModel", 1.06,
        {"attention_head_dim": 72, "in_channels": 4, "out_channels": 8, "num_layers": 28, "cross_attention_dim": 1152,
         "patch_size": 2, "caption_channels": 4096, "attention_bias": True, "activation_fn": "gelu-approximate",
         "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "num_embeds_ada_norm": 1000},
    ),
    "FLUX.1 T5-XXL": Released(
        "T5EncoderModel", 4.76,
        {"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
         "feed_forward_proj": "gated-gelu"},
    ),
    "Wan UMT5-XXL": Released(
        "UMT5EncoderModel", 5.68,
        {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
         "feed_forward_proj": "gated-gelu"},
    ),
}
# fmt: on
