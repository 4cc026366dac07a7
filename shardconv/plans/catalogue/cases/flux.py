"""FLUX and its relatives: rows of image and text tokens, ids for their places."""

from __future__ import annotations

from collections.abc import Mapping

from .draw import Case, Config, Draw, Inputs, grid_ids, text_mask, values, zeros


def flux_like(c: Config, d: Draw) -> Inputs:
    axes = len(c.axes_dims_rope)
    return {
        "hidden_states": d.normal(2, 16, c.in_channels),
        "encoder_hidden_states": d.normal(2, 6, c.joint_attention_dim),
        "timestep": values(0.75, 0.25),
        "img_ids": grid_ids(axes),
        "txt_ids": zeros(6, axes),
    }


def flux(c: Config, d: Draw) -> Inputs:
    given = flux_like(c, d) | {"pooled_projections": d.normal(2, c.pooled_projection_dim)}
    return given | ({"guidance": values(3.5, 3.5)} if c.guidance_embeds else {})


def flux2(c: Config, d: Draw) -> Inputs:
    given = flux_like(c, d)
    given |= {"img_ids": given["img_ids"].expand(2, -1, -1), "txt_ids": given["txt_ids"].expand(2, -1, -1)}
    return given | ({"guidance": values(4, 4)} if getattr(c, "guidance_embeds", True) else {})


def flux3(c: Config, d: Draw) -> Inputs:
    given = flux_like(c, d)
    given["image_cond_hidden_states"] = d.normal(2, 16, c.cond_in_channels)
    given["image_cond_ids"] = given["img_ids"] + 1
    return given | ({"target_timestep": values(0.5, 0)} if c.flow_map else {})


def qwenimage(c: Config, d: Draw) -> Inputs:
    layered = {"additional_t_cond": d.below(2, 2)} if c.use_additional_t_cond else {}
    return layered | {
        "hidden_states": d.normal(2, 16, c.in_channels),
        "encoder_hidden_states": d.normal(2, 6, c.joint_attention_dim),
        "encoder_hidden_states_mask": text_mask(6, 2),
        "timestep": values(0.75, 0.25),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }


def qwenimage21(c: Config, d: Draw) -> Inputs:
    import torch

    img_mask = torch.zeros(2, 6 + 4, dtype=torch.bool)  # one for 4 image tokens
    img_mask[:, 6:] = True
    return {
        "hidden_states": d.normal(2, 16, c.in_channels),
        "encoder_hidden_states": d.normal(2, 6, c.context_in_dim),
        "encoder_hidden_states_mask": text_mask(6, 2),
        "timestep": values(0.75, 0.25),
        "img_shapes": [[(1, 4, 4)]] * 2,
        "img_mask": img_mask,
    }


def chroma(c: Config, d: Draw) -> Inputs:
    return flux_like(c, d) | {"attention_mask": text_mask(6 + 16, 2, 0)}


def bria_fibo(c: Config, d: Draw) -> Inputs:
    num = c.num_layers + c.num_single_layers
    return flux_like(c, d) | {"text_encoder_layers": [d.normal(2, 6, c.text_encoder_dim) for _ in range(num)]}


def longcat_image(c: Config, d: Draw) -> Inputs:
    return flux_like(c, d)


def bria_fibo2(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(1, c.in_channels, 8, 8),
        "timestep": values(0.5),
        "encoder_hidden_states": d.normal(1, 1 + len(c.injection_layer_ids), 6, c.cap_feat_dim),
    }


# fmt: off
FLUX = {
    "in_channels": 8, "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16,
    "joint_attention_dim": 20, "axes_dims_rope": (4, 6, 6),
}

CASES: Mapping[str, Case] = {
    "FluxTransformer2DModel": Case(FLUX | {"pooled_projection_dim": 12, "guidance_embeds": True}, flux),
    "Flux2Transformer2DModel": Case(FLUX | {"timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)}, flux2),
    "QwenImageTransformer2DModel": Case(
        {
            "in_channels": 8, "out_channels": 2, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16,
            "joint_attention_dim": 20, "axes_dims_rope": (4, 6, 6),
        },
        qwenimage,
    ),
    "QwenImage21Transformer2DModel": Case(
        {
            "in_channels": 8, "out_channels": 8, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16,
            "context_in_dim": 20, "axes_dims_rope": (4, 6, 6),
        },
        qwenimage21,
    ),
    "ChromaTransformer2DModel": Case(
        FLUX | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}, chroma
    ),
    "BriaTransformer2DModel": Case(FLUX, flux_like),
    "BriaFiboTransformer2DModel": Case(FLUX | {"text_encoder_dim": 12}, bria_fibo),
    "LongCatImageTransformer2DModel": Case(FLUX | {"pooled_projection_dim": 12}, longcat_image),
    "OvisImageTransformer2DModel": Case(FLUX | {"out_channels": 8}, flux_like),
    "Flux3Transformer2DModel": Case(
        FLUX | {"cond_in_channels": 6, "timestep_channels": 32, "axes_dims_rope": (4, 4, 4, 4)}, flux3
    ),
    "BriaFibo2Transformer2DModel": Case(
        {
            "in_channels": 4, "dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "cap_feat_dim": 20,
            "injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 4, "max_num_gist_tokens": 8,
            "gist_step": 4, "gist_min_text_len": 4, "gist_max_text_len": 16, "axes_dims": (4, 6, 6),
            "axes_lens": (16, 16, 16),
        },
        bria_fibo2,
    ),
}
# fmt: on
