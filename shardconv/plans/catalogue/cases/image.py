"""Image models."""

from __future__ import annotations

from collections.abc import Mapping

from .draw import Case, Config, Draw, Inputs, grid_ids, text_mask, values, zeros


def hunyuan_image(c: Config, d: Draw) -> Inputs:
    given = {
        "hidden_states": d.normal(1, c.in_channels, 4, 4),
        "timestep": values(500),
        "encoder_hidden_states": d.normal(1, 6, c.text_embed_dim),
        "encoder_attention_mask": text_mask(6),
    }
    if c.text_embed_2_dim:
        given |= {
            "encoder_hidden_states_2": d.normal(1, 4, c.text_embed_2_dim),
            "encoder_attention_mask_2": text_mask(4),
        }
    return given | ({"guidance": values(3500)} if c.guidance_embeds else {})


def hunyuan_dit(c: Config, d: Draw) -> Inputs:
    import torch

    tokens = (8 // c.patch_size) ** 2
    return {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "timestep": values(500, 250),
        "encoder_hidden_states": d.normal(2, c.text_len, c.cross_attention_dim),
        "text_embedding_mask": text_mask(c.text_len, 2),
        "encoder_hidden_states_t5": d.normal(2, c.text_len_t5, c.cross_attention_dim_t5),
        "text_embedding_mask_t5": text_mask(c.text_len_t5, 2),
        "image_meta_size": torch.tensor([[8.0, 8, 8, 8, 0, 0]] * 2),
        "style": torch.zeros(2, dtype=torch.long),
        "image_rotary_emb": (d.normal(tokens, c.attention_head_dim), d.normal(tokens, c.attention_head_dim)),
    }


def cogview(c: Config, d: Draw) -> Inputs:
    size = values(64, 64)[None].expand(2, -1)
    return {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "encoder_hidden_states": d.normal(2, 6, c.text_embed_dim),
        "timestep": values(500, 250),
        "original_size": size,
        "target_size": size,
        "crop_coords": zeros(2, 2),
    }


def glm_image(c: Config, d: Draw) -> Inputs:
    import torch

    given = cogview(c, d)
    del given["original_size"]
    tokens = (8 // c.patch_size) ** 2
    return given | {
        "prior_token_id": d.below(c.prior_vq_quantizer_codebook_size, 2, tokens),
        "prior_token_drop": torch.zeros(2, tokens, dtype=torch.bool),
    }


def sd3(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "encoder_hidden_states": d.normal(2, 6, c.joint_attention_dim),
        "pooled_projections": d.normal(2, c.pooled_projection_dim),
        "timestep": values(500, 250),
    }


def auraflow(c: Config, d: Draw) -> Inputs:
    given = sd3_like(c, d)
    return given | {"timestep": values(0.75, 0.25)}


def sd3_like(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "encoder_hidden_states": d.normal(2, 6, c.joint_attention_dim),
    }


def pixart(c: Config, d: Draw) -> Inputs:
    additional = c.use_additional_conditions or (c.use_additional_conditions is None and c.sample_size == 128)
    return {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "encoder_hidden_states": d.normal(2, 6, c.caption_channels or c.cross_attention_dim),
        "timestep": values(500, 250),
        "encoder_attention_mask": text_mask(6, 2, dtype="float32"),
        "added_cond_kwargs": {
            "resolution": values(64, 64)[None].expand(2, -1) if additional else None,
            "aspect_ratio": values(1, 1)[:, None] if additional else None,
        },
    }


def sana(c: Config, d: Draw) -> Inputs:
    given = {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "encoder_hidden_states": d.normal(2, 6, c.caption_channels),
        "timestep": values(500, 250),
        "encoder_attention_mask": text_mask(6, 2, dtype="float32"),
    }
    return given | ({"guidance": values(4.5, 4.5)} if c.guidance_embeds else {})


def z_image(c: Config, d: Draw) -> Inputs:
    return {
        "x": [d.normal(c.in_channels, 1, 8, 8), d.normal(c.in_channels, 1, 8, 8)],
        "t": values(0.75, 0.25),
        "cap_feats": [d.normal(6, c.cap_feat_dim), d.normal(4, c.cap_feat_dim)],
        "patch_size": c.all_patch_size[0],
        "f_patch_size": c.all_f_patch_size[0],
    }


def lumina2(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "timestep": values(0.75, 0.25),
        "encoder_hidden_states": d.normal(2, 6, c.cap_feat_dim),
        "encoder_attention_mask": text_mask(6, 2),
    }


def lumina_next(c: Config, d: Draw) -> Inputs:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    return {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "timestep": values(0.75, 0.25),
        "encoder_hidden_states": d.normal(2, 6, c.cross_attention_dim),
        "encoder_mask": text_mask(6, 2),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(c.hidden_size // c.num_attention_heads, 16, 16),
        "cross_attention_kwargs": {},
    }


def ideogram4(c: Config, d: Draw) -> Inputs:
    import torch
    from diffusers.models.transformers.transformer_ideogram4 import (
        IMAGE_POSITION_OFFSET,
        LLM_TOKEN_INDICATOR,
        OUTPUT_IMAGE_INDICATOR,
    )

    text = torch.arange(4)[:, None].expand(-1, 3)
    image = grid_ids(3, 2, 2).long() + IMAGE_POSITION_OFFSET
    return {
        "hidden_states": torch.cat([zeros(1, 4, c.in_channels), d.normal(1, 4, c.in_channels)], dim=1),
        "encoder_hidden_states": torch.cat(
            [d.normal(1, 4, c.llm_features_dim), zeros(1, 4, c.llm_features_dim)], dim=1
        ),
        "timestep": values(0.5),
        "position_ids": torch.cat([text, image])[None],
        "segment_ids": torch.ones(1, 8, dtype=torch.long),
        "indicator": torch.tensor([[LLM_TOKEN_INDICATOR] * 4 + [OUTPUT_IMAGE_INDICATOR] * 4]),
    }


def krea2(c: Config, d: Draw) -> Inputs:
    import torch

    return {
        "hidden_states": d.normal(2, 16, c.in_channels),
        "encoder_hidden_states": d.normal(2, 6, c.num_text_layers, c.text_hidden_dim),
        "timestep": values(0.75, 0.25),
        "position_ids": torch.cat([zeros(6, 3), grid_ids(3)]),
        "encoder_attention_mask": text_mask(6, 2),
    }


def ernie_image(c: Config, d: Draw) -> Inputs:
    import torch

    return {
        "hidden_states": d.normal(2, c.in_channels, 4, 4),
        "timestep": values(500, 250),
        "text_bth": d.normal(2, 6, c.text_in_dim),
        "text_lens": torch.tensor([6, 4]),
    }


def omnigen(c: Config, d: Draw) -> Inputs:
    import torch

    length = 24 + 1 + 16
    return {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "timestep": values(0.75, 0.25),
        "input_ids": d.below(10, 2, 24),
        "input_img_latents": [d.normal(1, c.in_channels, 8, 8)],
        "input_image_sizes": {0: [[0, 16]]},
        "attention_mask": torch.ones(2, length, length),
        "position_ids": torch.arange(length).expand(2, -1),
    }


def prx(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "timestep": values(0.75, 0.25),
        "encoder_hidden_states": d.normal(2, 6, c.context_in_dim),
        "attention_mask": text_mask(6, 2),
    }


def joyimage(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(1, c.in_channels, 1, 8, 8),
        "timestep": values(500),
        "encoder_hidden_states": d.normal(1, 6, c.text_dim),
    }


def joyimage_plus(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(1, 8, c.in_channels, *c.patch_size),
        "timestep": values(500),
        "encoder_hidden_states": d.normal(1, 6, c.text_dim),
        "shape_list": [[(1, 2, 2), (1, 2, 2)]],
    }


def hidream(c: Config, d: Draw) -> Inputs:
    pooled, t5, llama = c.text_emb_dim, c.caption_channels[0], c.caption_channels[1]
    return {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "timesteps": values(500, 250),
        "encoder_hidden_states_t5": d.normal(2, 6, t5),
        "encoder_hidden_states_llama3": d.normal(max(c.llama_layers) + 1, 2, 6, llama),
        "pooled_embeds": d.normal(2, pooled),
    }


def nucleus(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(2, 16, c.in_channels),
        "img_shapes": [(1, 4, 4)] * 2,
        "encoder_hidden_states": d.normal(2, 6, c.joint_attention_dim),
        "encoder_hidden_states_mask": text_mask(6, 2, dtype="int64"),
        "timestep": values(0.75, 0.25),
    }


# fmt: off
HUNYUAN = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 10, "num_layers": 1,
    "num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 20, "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}
COG = {
    "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 12,
    "text_embed_dim": 20, "num_layers": 2,
}
SANA = {
    "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12,
    "num_cross_attention_heads": 8, "cross_attention_head_dim": 4, "cross_attention_dim": 48, "caption_channels": 20,
    "sample_size": 8, "qk_norm": "rms_norm_across_heads", "mlp_ratio": 2.0,
}
JOYIMAGE = {
    "hidden_size": 48, "in_channels": 4, "num_attention_heads": 4, "text_dim": 20, "num_layers": 2,
    "rope_dim_list": [4, 4, 4],
}

CASES: Mapping[str, Case] = {
    "HunyuanImageTransformer2DModel": Case(
        {key: value for key, value in HUNYUAN.items() if key != "pooled_projection_dim"}
        | {"text_embed_2_dim": 12, "rope_axes_dim": (4, 6), "guidance_embeds": True},
        hunyuan_image,
    ),
    "HunyuanDiT2DModel": Case(
        {
            "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "patch_size": 2, "sample_size": 8,
            "hidden_size": 32, "num_layers": 4, "cross_attention_dim": 20, "cross_attention_dim_t5": 24,
            "pooled_projection_dim": 12, "text_len": 6, "text_len_t5": 6,
        },
        hunyuan_dit,
    ),
    "CogView3PlusTransformer2DModel": Case(
        COG | {"condition_dim": 4, "pos_embed_max_size": 8, "sample_size": 8}, cogview
    ),
    "CogView4Transformer2DModel": Case(
        COG | {"condition_dim": 4, "pos_embed_max_size": 8, "sample_size": 8, "rope_axes_dim": (8, 8)}, cogview
    ),
    "GlmImageTransformer2DModel": Case(COG | {"condition_dim": 4, "prior_vq_quantizer_codebook_size": 32}, glm_image),
    "SD3Transformer2DModel": Case(
        {
            "sample_size": 8, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8, "num_attention_heads": 4,
            "joint_attention_dim": 20, "caption_projection_dim": 32, "pooled_projection_dim": 12, "out_channels": 4,
            "pos_embed_max_size": 8, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
        },
        sd3,
    ),
    "AuraFlowTransformer2DModel": Case(
        {
            "sample_size": 8, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 2,
            "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 20, "caption_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        auraflow,
    ),
    "PixArtTransformer2DModel": Case(
        {
            "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
            "cross_attention_dim": 32, "sample_size": 8, "caption_channels": 20, "norm_num_groups": 4,
        },
        pixart,
    ),
    "SanaTransformer2DModel": Case(SANA | {"guidance_embeds": True}, sana),
    "ZImageTransformer2DModel": Case(
        {
            "in_channels": 4, "dim": 96, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 8, "n_kv_heads": 8,
            "cap_feat_dim": 20, "axes_dims": [4, 4, 4], "axes_lens": [64, 16, 16],
        },
        z_image,
    ),
    "Lumina2Transformer2DModel": Case(
        {
            "sample_size": 8, "in_channels": 4, "hidden_size": 96, "num_layers": 2, "num_refiner_layers": 1,
            "num_attention_heads": 8, "num_kv_heads": 4, "multiple_of": 16, "axes_dim_rope": (4, 4, 4),
            "axes_lens": (16, 16, 16), "cap_feat_dim": 20,
        },
        lumina2,
    ),
    "LuminaNextDiT2DModel": Case(
        {
            "sample_size": 8, "in_channels": 4, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 8,
            "num_kv_heads": 4, "multiple_of": 16, "cross_attention_dim": 20,
        },
        lumina_next,
    ),
    "Ideogram4Transformer2DModel": Case(
        {
            "in_channels": 16, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
            "intermediate_size": 40, "adaln_dim": 16, "llm_features_dim": 24, "rope_theta": 10_000,
            "mrope_section": (2, 1, 1),
        },
        ideogram4,
    ),
    "Krea2Transformer2DModel": Case(
        {
            "in_channels": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "intermediate_size": 48, "timestep_embed_dim": 16, "text_hidden_dim": 32,
            "num_text_layers": 3, "text_num_attention_heads": 4, "text_num_key_value_heads": 4,
            "text_intermediate_size": 40, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 2, 2),
        },
        krea2,
    ),
    "ErnieImageTransformer2DModel": Case(
        {
            "hidden_size": 64, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 72, "in_channels": 8,
            "out_channels": 8, "text_in_dim": 20, "rope_axes_dim": (4, 6, 6),
        },
        ernie_image,
    ),
    "OmniGenTransformer2DModel": Case(
        {
            "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48,
            "num_layers": 2, "pad_token_id": 0, "vocab_size": 50, "in_channels": 4, "time_step_dim": 8,
            "rope_scaling": {"long_factor": [1, 2, 3, 4], "short_factor": [1, 2, 3, 4]},
        },
        omnigen,
    ),
    "PRXTransformer2DModel": Case(
        {
            "in_channels": 4, "context_in_dim": 20, "hidden_size": 64, "mlp_ratio": 2.0, "num_heads": 4, "depth": 2,
            "axes_dim": [8, 8],
        },
        prx,
    ),
    "JoyImageEditTransformer3DModel": Case(JOYIMAGE, joyimage),
    "JoyImageEditPlusTransformer3DModel": Case(JOYIMAGE, joyimage_plus),
    "HiDreamImageTransformer2DModel": Case(
        {
            "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
            "attention_head_dim": 8, "num_attention_heads": 4, "caption_channels": [20, 12], "text_emb_dim": 10,
            "num_routed_experts": 4, "num_activated_experts": 2, "axes_dims_rope": (4, 2, 2), "max_resolution": (8, 8),
            "llama_layers": (0, 1), "force_inference_output": True,
        },
        hidream,
    ),
    "NucleusMoEImageTransformer2DModel": Case(
        {
            "in_channels": 8, "out_channels": 2, "num_layers": 5, "attention_head_dim": 16, "num_attention_heads": 8,
            "num_key_value_heads": 4, "joint_attention_dim": 20, "axes_dims_rope": (4, 6, 6), "mlp_ratio": 2.0,
            "num_experts": 4, "moe_intermediate_dim": 24, "capacity_factors": [2.0] * 5,
        },
        nucleus,
    ),
}
# fmt: on
