"""Video models."""

from __future__ import annotations

from collections.abc import Mapping

from .draw import Case, Config, Draw, Inputs, arange, text_mask, values, zeros
from .image import COG, HUNYUAN, SANA, sana


def hunyuan_video(c: Config, d: Draw) -> Inputs:
    given = {
        "hidden_states": d.normal(1, c.in_channels, 2, 4, 4),
        "timestep": values(500),
        "encoder_hidden_states": d.normal(1, 6, c.text_embed_dim),
        "encoder_attention_mask": text_mask(6),
        "pooled_projections": d.normal(1, c.pooled_projection_dim),
    }
    return given | ({"guidance": values(6000)} if c.guidance_embeds else {})


def framepack(c: Config, d: Draw) -> Inputs:
    given = hunyuan_video(c, d) | {"image_embeds": d.normal(1, 4, c.image_proj_dim), "indices_latents": arange(2)}
    if c.has_clean_x_embedder:
        given |= {
            "latents_clean": d.normal(1, c.in_channels, 2, 4, 4),
            "indices_latents_clean": arange(2),
            "latents_history_2x": d.normal(1, c.in_channels, 2, 4, 4),
            "indices_latents_history_2x": arange(2),
            "latents_history_4x": d.normal(1, c.in_channels, 4, 8, 8),
            "indices_latents_history_4x": arange(4),
        }
    return given


def hunyuan_video_15(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(1, c.in_channels, 2, 4, 4),
        "timestep": values(500),
        "encoder_hidden_states": d.normal(1, 6, c.text_embed_dim),
        "encoder_attention_mask": text_mask(6),
        "encoder_hidden_states_2": d.normal(1, 4, c.text_embed_2_dim),
        "encoder_attention_mask_2": text_mask(4),
        "image_embeds": d.normal(1, 3, c.image_embed_dim),
    }


def ltx(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(2, 2 * 4 * 4, c.in_channels),
        "encoder_hidden_states": d.normal(2, 6, c.caption_channels),
        "timestep": values(500, 250),
        "encoder_attention_mask": text_mask(6, 2),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


def ltx2(c: Config, d: Draw) -> Inputs:
    text, audio_text = c.caption_channels, c.caption_channels
    if not c.use_prompt_embeddings:
        text, audio_text = c.cross_attention_dim, c.audio_cross_attention_dim
    perturbed = {"perturbation_mask": values(0, 1), "spatio_temporal_guidance_blocks": [0]} if c.perturbed_attn else {}
    return perturbed | {
        "hidden_states": d.normal(2, 2 * 4 * 4, c.in_channels),
        "audio_hidden_states": d.normal(2, 9, c.audio_in_channels),
        "encoder_hidden_states": d.normal(2, 6, text),
        "audio_encoder_hidden_states": d.normal(2, 6, audio_text),
        "sigma": values(0.5, 0.25),
        "timestep": values(500, 250),
        "encoder_attention_mask": text_mask(6, 2),
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "audio_num_frames": 9,
        "fps": 25.0,
    }


def sana_wm_refiner(c: Config, d: Draw) -> Inputs:
    from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMLTX2AudioVideoRotaryPosEmbed

    rope = SanaWMLTX2AudioVideoRotaryPosEmbed(
        dim=c.num_attention_heads * c.attention_head_dim,
        patch_size=c.patch_size,
        patch_size_t=c.patch_size_t,
        base_num_frames=20,
        base_height=c.base_height,
        base_width=c.base_width,
        scale_factors=c.vae_scale_factors,
        modality="video",
        double_precision=c.rope_double_precision,
        num_attention_heads=c.num_attention_heads,
        rope_type=c.rope_type,
    )
    coords = rope.prepare_video_coords(2, 2, 4, 4, device="cpu", fps=24.0)
    return {
        "hidden_states": d.normal(2, 2 * 4 * 4, c.in_channels),
        "encoder_hidden_states": d.normal(2, 6, c.caption_channels),
        "timestep": d.below(1000, 2, 2 * 4 * 4).float(),
        "video_rotary_emb": rope(coords, device="cpu"),
        "encoder_attention_mask": text_mask(6, 2, dtype="float32"),
    }


def cogvideox(c: Config, d: Draw) -> Inputs:
    frames = getattr(c, "patch_size_t", None) or 1  # of one patch
    given: Inputs = {
        "hidden_states": d.normal(2, frames, c.in_channels, c.sample_height, c.sample_width),
        "encoder_hidden_states": d.normal(2, c.max_text_seq_length, c.text_embed_dim),
        "timestep": values(500, 250),
    }
    if c.use_rotary_positional_embeddings:
        tokens = (c.sample_height // c.patch_size) * (c.sample_width // c.patch_size)
        given["image_rotary_emb"] = (d.normal(tokens, c.attention_head_dim), d.normal(tokens, c.attention_head_dim))
    return given | ({"ofs": values(2, 2)} if getattr(c, "ofs_embed_dim", None) else {})


def consisid(c: Config, d: Draw) -> Inputs:
    given = cogvideox(c, d)
    if c.is_train_face:
        given["id_cond"] = d.normal(2, c.LFE_id_dim)
        given["id_vit_hidden"] = [d.normal(2, 2, c.LFE_vit_dim) for _ in range(c.LFE_num_scale)]
    return given


def latte(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(2, c.in_channels, c.video_length, 8, 8),
        "encoder_hidden_states": d.normal(2, 6, c.caption_channels),
        "timestep": values(500, 250),
    }


def allegro(c: Config, d: Draw) -> Inputs:
    import torch
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    *rope, frames, rows, columns = get_3d_rotary_pos_embed_allegro(
        embed_dim=c.attention_head_dim, crops_coords=((0, 0), (4, 4)), grid_size=(4, 4), temporal_size=2
    )
    ids = torch.cartesian_prod(frames.long(), rows.long(), columns.long()).T.reshape(3, 1, -1)
    return {
        "hidden_states": d.normal(2, c.in_channels, 2, 8, 8),
        "encoder_hidden_states": d.normal(2, 6, c.caption_channels),
        "timestep": values(500, 250),
        "attention_mask": zeros(2, 2, 8, 8) + 1,
        "encoder_attention_mask": text_mask(6, 2, dtype="float32")[:, None],
        "image_rotary_emb": (tuple(rope), tuple(ids.contiguous())),
    }


def sana_video(c: Config, d: Draw) -> Inputs:
    return sana(c, d) | {"hidden_states": d.normal(2, c.in_channels, 2, 8, 8)}


def mochi(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(2, c.in_channels, 2, 8, 8),
        "encoder_hidden_states": d.normal(2, 6, c.text_embed_dim),
        "timestep": values(500, 250),
        "encoder_attention_mask": text_mask(6, 2),
    }


def cosmos(c: Config, d: Draw) -> Inputs:
    text = d.normal(1, 6, c.crossattn_proj_in_channels if c.use_crossattn_projection else c.text_embed_dim)
    given: Inputs = {
        "hidden_states": d.normal(1, c.in_channels, 1, 8, 8),
        "timestep": values(500),
        "encoder_hidden_states": text,
        "fps": 30,
    }
    if c.img_context_dim_in:
        given["encoder_hidden_states"] = (text, d.normal(1, 3, c.img_context_dim_in))
    return given | ({"padding_mask": zeros(1, 1, 8, 8)} if c.concat_padding_mask else {})


def cosmos3(c: Config, d: Draw) -> Inputs:
    import torch

    channels = c.patch_latent_dim // c.latent_patch_size**2
    side = 2 * c.latent_patch_size
    vision = arange(8, 4)
    return {
        "input_ids": d.below(c.vocab_size, 4),
        "text_indexes": arange(4),
        "position_ids": torch.stack([arange(8)] * 3),
        "und_len": 4,
        "sequence_length": 8,
        "vision_tokens": [d.normal(1, channels, 1, side, side)],
        "vision_token_shapes": [(1, 2, 2)],
        "vision_sequence_indexes": vision,
        "vision_mse_loss_indexes": vision,
        "vision_timesteps": torch.full((4,), 500.0),
        "vision_noisy_frame_indexes": [torch.tensor([0])],
    }


def kandinsky5(c: Config, d: Draw) -> Inputs:
    channels = 2 * c.in_visual_dim + 1 if c.visual_cond else c.in_visual_dim
    return {
        "hidden_states": d.normal(1, 2, 4, 4, channels),
        "encoder_hidden_states": d.normal(1, 6, c.in_text_dim),
        "timestep": values(500),
        "pooled_projections": d.normal(1, c.in_text_dim2),
        "visual_rope_pos": [arange(2), arange(2), arange(2)],
        "text_rope_pos": arange(6),
    }


def kandinsky6(c: Config, d: Draw) -> Inputs:
    video = 2 * c.in_visual_dim + 1 if c.visual_cond else c.in_visual_dim
    return {
        "hidden_states": d.normal(1, 2, 4, 4, video),
        "encoder_hidden_states": d.normal(1, 6, c.in_text_dim),
        "pooled_projections": d.normal(1, c.in_text_dim2),
        "timestep": values(500),
        "audio_hidden_states": d.normal(1, 5, c.in_audio_dim),
    }


def kandinsky6_sr(c: Config, d: Draw) -> Inputs:
    return {"hidden_states": d.normal(1, 2, 16, 16, 2 * c.in_visual_dim + 1), "timestep": values(500)}


def easyanimate(c: Config, d: Draw) -> Inputs:
    given = {
        "hidden_states": d.normal(2, c.in_channels, 2, 8, 8),
        "timestep": values(500, 250),
        "encoder_hidden_states": d.normal(2, 6, c.text_embed_dim),
    }
    return given | ({"encoder_hidden_states_t5": d.normal(2, 5, c.text_embed_dim_t5)} if c.text_embed_dim_t5 else {})


def motif_video(c: Config, d: Draw) -> Inputs:
    given = {
        "hidden_states": d.normal(1, c.in_channels, 2, 4, 4),
        "timestep": values(500),
        "encoder_hidden_states": d.normal(1, 6, c.text_embed_dim),
        "encoder_attention_mask": text_mask(6),
    }
    return given | ({"image_embeds": d.normal(1, 4, c.image_embed_dim)} if c.image_embed_dim else {})


def minimax_h3(c: Config, d: Draw) -> Inputs:
    import torch

    text, audio, video = 6, 4, 8
    tags = torch.tensor([1] * text + [2] * audio + [0] * video)
    ids = torch.zeros(text + audio + video, 3, dtype=torch.long)
    ids[:, 0] = arange(text + audio + video)
    channels = c.in_channels * c.patch_size[0] * c.patch_size[1] * c.patch_size[2]
    return {
        "hidden_states": d.normal(1, video, channels),
        "audio_hidden_states": d.normal(1, audio, c.audio_in_channels),
        "encoder_hidden_states": d.normal(1, text, c.text_dim),
        "timestep": values(0.75, 0.5),
        "timestep_indices": torch.where(tags == 2, 1, 0),
        "token_tags": tags,
        "position_ids": ids,
        "video_indices": (tags == 0).nonzero()[:, 0],
        "audio_indices": (tags == 2).nonzero()[:, 0],
        "text_indices": (tags == 1).nonzero()[:, 0],
    }


# fmt: off
COGVIDEOX = COG | {
    "sample_width": 8, "sample_height": 8, "sample_frames": 1, "max_text_seq_length": 6,
    "use_rotary_positional_embeddings": True,
}
LTX2 = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32,
    "audio_in_channels": 6, "audio_out_channels": 6, "audio_num_attention_heads": 4, "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 16, "num_layers": 2, "caption_channels": 20, "gated_attn": True,
    "audio_gated_attn": True, "rope_double_precision": False,
}

CASES: Mapping[str, Case] = {
    "HunyuanVideoTransformer3DModel": Case(HUNYUAN, hunyuan_video),
    "HunyuanVideoFramepackTransformer3DModel": Case(
        HUNYUAN | {"has_image_proj": True, "image_proj_dim": 12, "has_clean_x_embedder": True}, framepack
    ),
    "HunyuanVideo15Transformer3DModel": Case(
        {key: value for key, value in HUNYUAN.items() if key not in ("num_single_layers", "pooled_projection_dim")}
        | {"text_embed_2_dim": 12, "image_embed_dim": 14},
        hunyuan_video_15,
    ),
    "LTXVideoTransformer3DModel": Case(
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 8,
            "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 20,
        },
        ltx,
    ),
    "LTX2VideoTransformer3DModel": Case(LTX2, ltx2),
    "SanaWMLTX2RefinerTransformer3DModel": Case(LTX2, sana_wm_refiner),
    "CogVideoXTransformer3DModel": Case(COGVIDEOX, cogvideox),
    "ConsisIDTransformer3DModel": Case(
        COGVIDEOX
        | {
            "attention_head_dim": 12, "is_train_face": True, "cross_attn_interval": 1, "cross_attn_dim_head": 4,
            "cross_attn_num_heads": 2, "LFE_id_dim": 6, "LFE_vit_dim": 6, "LFE_depth": 5, "LFE_dim_head": 4,
            "LFE_num_heads": 2, "LFE_num_id_token": 2, "LFE_num_querie": 3, "LFE_output_dim": 32, "LFE_ff_mult": 1,
            "LFE_num_scale": 1,
        },
        consisid,
    ),
    "LatteTransformer3DModel": Case(
        {
            "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2,
            "cross_attention_dim": 32, "sample_size": 8, "patch_size": 2, "caption_channels": 20, "video_length": 2,
            "attention_bias": True, "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False, "num_embeds_ada_norm": 1000,
        },
        latte,
    ),
    "AllegroTransformer3DModel": Case(
        {
            "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "num_layers": 2,
            "cross_attention_dim": 48, "sample_width": 8, "sample_height": 8, "sample_frames": 2,
            "caption_channels": 20,
        },
        allegro,
    ),
    "SanaVideoTransformer3DModel": Case(SANA | {"rope_max_seq_len": 32}, sana_video),
    "MochiTransformer3DModel": Case(
        {
            "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "pooled_projection_dim": 24,
            "in_channels": 4, "text_embed_dim": 32, "time_embed_dim": 12, "max_sequence_length": 6,
        },
        mochi,
    ),
    "CosmosTransformer3DModel": Case(
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2,
            "text_embed_dim": 20, "adaln_lora_dim": 8, "max_size": (4, 32, 32), "concat_padding_mask": False,
            "img_context_dim_in": 14, "img_context_num_tokens": 3, "img_context_dim_out": 48,
        },
        cosmos,
    ),
    "Cosmos3OmniTransformer": Case(
        {
            "head_dim": 12, "hidden_size": 40, "intermediate_size": 56, "latent_channel": 4, "latent_patch_size": 2,
            "num_attention_heads": 8, "num_hidden_layers": 2, "num_key_value_heads": 4, "patch_latent_dim": 16,
            "rope_axes_dim": [2, 2, 2], "vocab_size": 50,
        },
        cosmos3,
    ),
    "Kandinsky5Transformer3DModel": Case(
        {
            "in_text_dim": 20, "in_text_dim2": 10, "time_dim": 16, "model_dim": 64, "ff_dim": 72, "num_text_blocks": 1,
            "num_visual_blocks": 2, "axes_dims": (4, 6, 6),
        },
        kandinsky5,
    ),
    "Kandinsky6Transformer3DModel": Case(
        {
            "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 20, "in_text_dim2": 10, "time_dim": 16,
            "model_dim": 48, "ff_dim": 72, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 4, 4),
            "in_audio_dim": 6, "out_audio_dim": 6,
        },
        kandinsky6,
    ),
    "Kandinsky6SRTransformer3DModel": Case(
        {
            "in_visual_dim": 4, "out_visual_dim": 8, "time_dim": 16, "patch_size": (1, 2, 2), "model_dim": 48,
            "ff_dim": 72, "num_visual_blocks": 2, "axes_dims": (4, 4, 4),
        },
        kandinsky6_sr,
    ),
    "EasyAnimateTransformer3DModel": Case(
        {
            "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2,
            "mmdit_layers": 2, "time_embed_dim": 12, "text_embed_dim": 20, "patch_size": 2, "sample_width": 8,
            "sample_height": 8,
        },
        easyanimate,
    ),
    "MotifVideoTransformer3DModel": Case(
        {key: value for key, value in HUNYUAN.items() if key not in ("num_refiner_layers", "pooled_projection_dim")}
        | {
            "image_embed_dim": 14, "attention_head_dim": 12, "rope_axes_dim": (4, 4, 4),
            "enable_text_cross_attention_dual": True,
        },
        motif_video,
    ),
    "MiniMaxH3Transformer3DModel": Case(
        {
            "num_attention_heads": 4, "attention_head_dim": 16, "hidden_size": 48, "num_layers": 2,
            "num_refiner_layers": 1, "ffn_dim": 72, "in_channels": 4, "audio_in_channels": 8, "text_dim": 20,
            "freq_dim": 32, "time_embed_hidden_dim": 48, "time_embed_dim": 24, "rope_freq_dim": 2,
        },
        minimax_h3,
    ),
}
# fmt: on
