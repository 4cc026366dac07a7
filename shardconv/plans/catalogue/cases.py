"""One small case for each class of the catalogue: a configuration of a few layers, and inputs for any configuration.

The tests and `shardconv check` compare sharded with unsharded models by them. Head counts are multiples of 4 where the
class allows, so that 2 and 4 ranks can share; widths differ from each other, so that a wrong dim cannot pass; optional
parts (image streams, masks, experts, gates) are switched on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Config = Any  # a model's config: attributes by name
Inputs = dict[str, Any]


class Draw:
    """Random inputs, the same for the same seed on every rank."""

    def __init__(self, seed: int) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """float32, N(0, 1)."""
        import torch

        return torch.randn(shape, generator=self._generator)

    def below(self, high: int, *shape: int) -> torch.Tensor:
        """int64, 0 to `high` - 1."""
        import torch

        return torch.randint(high, shape, generator=self._generator)


@dataclass(frozen=True, slots=True)
class Case:
    """How to build and to call a small model of one class."""

    config: Mapping[str, Any]
    inputs: Callable[[Config, Draw], Inputs]


def build(name: str, config: Mapping[str, Any] | None = None, seed: int = 0) -> Any:
    """A float32 model of the class `name` in eval mode, random weights of `seed`; `config` None: the small case's."""
    import torch

    from ...libraries.choose import model_class
    from . import small_models

    model = model_class(name).from_config(dict(CASES[name].config if config is None else config))
    model = model.to(torch.float32)
    small_models.randomize(model, seed)
    return model.eval()


def inputs(model: Any, seed: int = 1) -> Inputs:
    """Keyword arguments for a call of `model`, whose class has a case."""
    return CASES[type(model).__name__].inputs(model.config, Draw(seed))


def outputs(model: Any, given: Inputs) -> list[torch.Tensor]:
    """Every tensor that a call gives, in order."""
    import torch

    with torch.inference_mode():
        return list(_tensors(model(**given, return_dict=False)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


# --- inputs that several classes share


def values(*numbers: float) -> torch.Tensor:
    """A float32 vector."""
    import torch

    return torch.tensor(numbers, dtype=torch.float32)


def text_mask(tokens: int, batch: int = 1, left_out: int = 2, dtype: str = "bool") -> torch.Tensor:
    """`[batch, tokens]`: which count; the last `left_out` of the last sample do not."""
    import torch

    mask = torch.ones(batch, tokens, dtype=getattr(torch, dtype))
    if left_out:
        mask[-1, -left_out:] = 0
    return mask


def grid_ids(axes: int, height: int = 4, width: int = 4) -> torch.Tensor:
    """`[height * width, axes]`: row and column of each token on axes 1 and 2."""
    import torch

    ids = torch.zeros(height, width, axes)
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)[None, :]
    return ids.reshape(height * width, axes)


def zeros(*shape: int) -> torch.Tensor:
    """float32."""
    import torch

    return torch.zeros(shape)


def arange(stop: int, start: int = 0) -> torch.Tensor:
    """int64."""
    import torch

    return torch.arange(start, stop)


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


def sana(c: Config, d: Draw) -> Inputs:
    given = {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "encoder_hidden_states": d.normal(2, 6, c.caption_channels),
        "timestep": values(500, 250),
        "encoder_attention_mask": text_mask(6, 2, dtype="float32"),
    }
    return given | ({"guidance": values(4.5, 4.5)} if c.guidance_embeds else {})


def sana_video(c: Config, d: Draw) -> Inputs:
    return sana(c, d) | {"hidden_states": d.normal(2, c.in_channels, 2, 8, 8)}


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
    nr = c.num_layers + c.num_single_layers
    return flux_like(c, d) | {"text_encoder_layers": [d.normal(2, 6, c.text_encoder_dim) for _ in range(nr)]}


def longcat_image(c: Config, d: Draw) -> Inputs:
    return flux_like(c, d)


def z_image(c: Config, d: Draw) -> Inputs:
    return {
        "x": [d.normal(c.in_channels, 1, 8, 8), d.normal(c.in_channels, 1, 8, 8)],
        "t": values(0.75, 0.25),
        "cap_feats": [d.normal(6, c.cap_feat_dim), d.normal(4, c.cap_feat_dim)],
        "patch_size": c.all_patch_size[0],
        "f_patch_size": c.all_f_patch_size[0],
    }


def bria_fibo2(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(1, c.in_channels, 8, 8),
        "timestep": values(0.5),
        "encoder_hidden_states": d.normal(1, 1 + len(c.injection_layer_ids), 6, c.cap_feat_dim),
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


def hidream(c: Config, d: Draw) -> Inputs:
    pooled, t5, llama = c.text_emb_dim, c.caption_channels[0], c.caption_channels[1]
    return {
        "hidden_states": d.normal(2, c.in_channels, 8, 8),
        "timesteps": values(500, 250),
        "encoder_hidden_states_t5": d.normal(2, 6, t5),
        "encoder_hidden_states_llama3": d.normal(max(c.llama_layers) + 1, 2, 6, llama),
        "pooled_embeds": d.normal(2, pooled),
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


def minimax_music3(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(1, c.in_channels, 12),
        "timestep": values(0.5),
        "encoder_hidden_states": d.normal(1, 12, c.condition_dim),
    }


def nucleus(c: Config, d: Draw) -> Inputs:
    return {
        "hidden_states": d.normal(2, 16, c.in_channels),
        "img_shapes": [(1, 4, 4)] * 2,
        "encoder_hidden_states": d.normal(2, 6, c.joint_attention_dim),
        "encoder_hidden_states_mask": text_mask(6, 2, dtype="int64"),
        "timestep": values(0.75, 0.25),
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


# --- configurations
# fmt: off
WAN = {
    "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 32, "ffn_dim": 72, "num_layers": 2, "rope_max_seq_len": 32,
}
WAN_I2V = WAN | {"image_dim": 20, "added_kv_proj_dim": 48}
HUNYUAN = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 10, "num_layers": 1,
    "num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 20, "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}
COG = {
    "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 12,
    "text_embed_dim": 20, "num_layers": 2,
}
COGVIDEOX = COG | {
    "sample_width": 8, "sample_height": 8, "sample_frames": 1, "max_text_seq_length": 6,
    "use_rotary_positional_embeddings": True,
}
FLUX = {
    "in_channels": 8, "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16,
    "joint_attention_dim": 20, "axes_dims_rope": (4, 6, 6),
}
LTX2 = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32,
    "audio_in_channels": 6, "audio_out_channels": 6, "audio_num_attention_heads": 4, "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 16, "num_layers": 2, "caption_channels": 20, "gated_attn": True,
    "audio_gated_attn": True, "rope_double_precision": False,
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
    "HunyuanVideoTransformer3DModel": Case(HUNYUAN, hunyuan_video),
    "HunyuanVideoFramepackTransformer3DModel": Case(
        HUNYUAN | {"has_image_proj": True, "image_proj_dim": 12, "has_clean_x_embedder": True}, framepack
    ),
    "HunyuanVideo15Transformer3DModel": Case(
        {key: value for key, value in HUNYUAN.items() if key not in ("num_single_layers", "pooled_projection_dim")}
        | {"text_embed_2_dim": 12, "image_embed_dim": 14},
        hunyuan_video_15,
    ),
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
    "SanaTransformer2DModel": Case(SANA | {"guidance_embeds": True}, sana),
    "SanaVideoTransformer3DModel": Case(SANA | {"rope_max_seq_len": 32}, sana_video),
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
    "ZImageTransformer2DModel": Case(
        {
            "in_channels": 4, "dim": 96, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 8, "n_kv_heads": 8,
            "cap_feat_dim": 20, "axes_dims": [4, 4, 4], "axes_lens": [64, 16, 16],
        },
        z_image,
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
    "HiDreamImageTransformer2DModel": Case(
        {
            "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
            "attention_head_dim": 8, "num_attention_heads": 4, "caption_channels": [20, 12], "text_emb_dim": 10,
            "num_routed_experts": 4, "num_activated_experts": 2, "axes_dims_rope": (4, 2, 2), "max_resolution": (8, 8),
            "llama_layers": (0, 1), "force_inference_output": True,
        },
        hidream,
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
    "MiniMaxMusic3Transformer1DModel": Case(
        {
            "in_channels": 8, "condition_dim": 12, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8,
            "ff_inner_dim": 40, "rotary_dim": 4, "fourier_embedding_dim": 16,
        },
        minimax_music3,
    ),
    "NucleusMoEImageTransformer2DModel": Case(
        {
            "in_channels": 8, "out_channels": 2, "num_layers": 5, "attention_head_dim": 16, "num_attention_heads": 8,
            "num_key_value_heads": 4, "joint_attention_dim": 20, "axes_dims_rope": (4, 6, 6), "mlp_ratio": 2.0,
            "num_experts": 4, "moe_intermediate_dim": 24, "capacity_factors": [2.0] * 5,
        },
        nucleus,
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
