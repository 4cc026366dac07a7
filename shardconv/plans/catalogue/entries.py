"""The entries. A newcomer adds one here and its case in `cases/`; the tests go over both.

How to read one: `under(prefix, parts...)` puts a prefix before every key of the parts. `C` is colwise, `R` rowwise,
`F` colwise in as many equal parts as the layer after it takes one of (gate and up, queries, keys and values, or one
alone), `PR` packed rowwise of attention output and the rest, `N` a norm across all heads.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...format.plan import Rule, Style
from .entry import AS_TAKEN, OUT_AND_REST, Entry, Refused

C, R, N = Rule(Style.COLWISE), Rule(Style.ROWWISE), Rule(Style.NORM_ACROSS_HEADS)
F = Rule(Style.PACKED_COLWISE, AS_TAKEN)
PR = Rule(Style.PACKED_ROWWISE, OUT_AND_REST)
SPLIT = Rule(Style.ROWWISE_SPLIT_INPUT)
VOCABULARY = Rule(Style.VOCABULARY)

Rules = Mapping[str, Rule]


def under(prefix: str, *parts: Rules) -> dict[str, Rule]:
    """Every rule of the parts, its key behind `prefix`."""
    return {f"{prefix}.{key}": rule for part in parts for key, rule in part.items()}


def each(rule: Rule, *keys: str) -> dict[str, Rule]:
    """One rule for several keys."""
    return dict.fromkeys(keys, rule)


# --- parts: how diffusers' classes name the layers of an attention and of a feed-forward
QKV = each(C, "to_q", "to_k", "to_v")
ATTENTION = QKV | {"to_out.0": R}
PLAIN_OUT = QKV | {"to_out": R}
ADDED = each(C, "add_q_proj", "add_k_proj", "add_v_proj") | {"to_add_out": R}  # of the other stream
JOINT = ATTENTION | ADDED
ADDED_KV = each(C, "add_k_proj", "add_v_proj")
NORMS = each(N, "norm_q", "norm_k", "norm_added_k")
WIDE = ATTENTION | NORMS  # with norms of queries and keys across all heads
LONG_NAMES = each(C, "to_query", "to_key", "to_value") | {"out_layer": R}
FF = {"net.0.proj": F, "net.2": R}  # gate and up in one, or none, by the activation
W123 = each(C, "w1", "w3") | {"w2": R}
GATE_UP_DOWN = each(C, "gate_proj", "up_proj") | {"down_proj": R}
LINEAR_123 = each(C, "linear_1", "linear_3") | {"linear_2": R}
# Sana's: 1x1 to gate and up, depthwise 3x3 over both, 1x1 back
CONV_FF = {"conv_inverted": F, "conv_depth": F, "conv_point": R}

# --- plans that several classes share
T5 = each(VOCABULARY, "shared", "encoder.embed_tokens") | under(
    "encoder.block.*",
    under(
        "layer.0.SelfAttention",
        each(C, "q", "k", "v") | {"o": R, "relative_attention_bias.weight": Rule(Style.PARAMETER, dim=1)},
    ),
    under("layer.1.DenseReluDense", each(C, "wi", "wi_0", "wi_1") | {"wo": R}),
)
BLOCKS_12 = under("transformer_blocks.*", under("attn1", ATTENTION), under("attn2", ATTENTION), under("ff", FF))
WAN = under("blocks.*", under("attn1", WIDE), under("attn2", WIDE, ADDED_KV), under("ffn", FF))
DUAL = under("transformer_blocks.*", under("attn", JOINT), under("ff", FF), under("ff_context", FF))
SINGLE = under("single_transformer_blocks.*", under("attn", QKV), {"proj_mlp": C, "proj_out": PR})
REFINER = under("context_embedder.token_refiner.refiner_blocks.*", under("attn", ATTENTION), under("ff", FF))
COGVIDEO = under("transformer_blocks.*", under("attn1", ATTENTION), under("ff", FF))
SANA = under("transformer_blocks.*", under("attn1", WIDE), under("attn2", WIDE), under("ff", CONV_FF))
LTX2_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
LTX2 = under(
    "transformer_blocks.*",
    *(under(name, WIDE, {"to_gate_logits": C}) for name in LTX2_ATTENTIONS),
    under("ff", FF),
    under("audio_ff", FF),
)
JOYIMAGE = under(
    "double_blocks.*",
    under("attn", each(F, "img_attn_qkv", "txt_attn_qkv"), each(R, "img_attn_proj", "txt_attn_proj")),
    under("img_mlp", FF),
    under("txt_mlp", FF),
)
HIDREAM_MOE = under("ff_i", under("experts.*", W123), under("shared_experts", W123), W123)
HIDREAM_ATTENTION = PLAIN_OUT | each(N, "q_rms_norm", "k_rms_norm")
HIDREAM_TEXT = each(C, "to_q_t", "to_k_t", "to_v_t") | {"to_out_t": R} | each(N, "q_rms_norm_t", "k_rms_norm_t")
FLUX3_BLOCK = under("attn", ATTENTION) | under("ff", {"linear_in": F, "linear_out": R})
KANDINSKY6_BLOCK = (
    under("self_attention", LONG_NAMES) | under("cross_attention", LONG_NAMES) | under("feed_forward", FF)
)
KREA2_BLOCK = under("attn", ATTENTION, {"to_gate": C}) | under("ff", each(C, "gate", "up"), {"down": R})
LUMINA2_BLOCK = under("attn", ATTENTION) | under("feed_forward", LINEAR_123)
Z_IMAGE_BLOCK = under("attention", ATTENTION) | under("feed_forward", W123)
FIBO2_BLOCK = Z_IMAGE_BLOCK | under("cross_attention", ATTENTION)
AURAFLOW_FF = each(C, "linear_1", "linear_2") | {"out_projection": R}

# --- more to cut, for memory
MODULATION_12 = each(SPLIT, "transformer_blocks.*.norm1.linear", "transformer_blocks.*.norm1_context.linear")
MODULATION_FLUX = MODULATION_12 | {"single_transformer_blocks.*.norm.linear": SPLIT}
MODULATION_1 = each(SPLIT, "transformer_blocks.*.norm1.linear")
MODULATION_COG = MODULATION_1 | {"transformer_blocks.*.norm2.linear": SPLIT}
TIME_PROJ = each(SPLIT, "condition_embedder.time_proj")

# --- counts that become local, by the class of the module that holds them
GENERAL = ("heads", "inner_dim", "inner_kv_dim")
HEADS = {"Attention": GENERAL}  # diffusers' general attention module
WIDTHS = ("heads", "inner_dim", "kv_inner_dim")
WAN_HEADS = {"WanAttention": WIDTHS}
OWN = ("heads", "inner_dim")  # of attention modules that Flux's relatives and others have of their own

ENTRIES: Mapping[str, Entry] = {
    # diffusers has the plans of the first four
    "FluxTransformer2DModel": Entry(lean=MODULATION_FLUX),
    "Flux2Transformer2DModel": Entry(
        lean=each(
            SPLIT,
            "double_stream_modulation_img.linear",
            "double_stream_modulation_txt.linear",
            "single_stream_modulation.linear",
        )
    ),
    "QwenImageTransformer2DModel": Entry(
        lean=each(SPLIT, "transformer_blocks.*.img_mod.1", "transformer_blocks.*.txt_mod.1")
    ),
    "QwenImage21Transformer2DModel": Entry(lean=each(SPLIT, "modulation.1")),
    # Wan and what came of it: norms across all heads
    "WanTransformer3DModel": Entry(heads=WAN_HEADS, plan=WAN, lean=TIME_PROJ),
    "WanVACETransformer3DModel": Entry(
        heads=WAN_HEADS,
        plan=WAN | {f"vace_{key}": rule for key, rule in WAN.items()},
        lean=TIME_PROJ | each(SPLIT, "vace_blocks.*.proj_in", "vace_blocks.*.proj_out"),
    ),
    "WanAnimateTransformer3DModel": Entry(
        heads=WAN_HEADS | {"WanAnimateFaceBlockCrossAttention": WIDTHS},
        plan=WAN | under("face_adapter.*", PLAIN_OUT),
        lean=TIME_PROJ,
    ),
    "WanAnimate2Transformer3DModel": Entry(
        heads={"WanAnimate2Attention": ("heads",)},
        plan=under(
            "blocks.*",
            under("self_attn", WIDE),
            under("cross_attn", WIDE, ADDED_KV),
            {"ffn.0": C, "ffn.2": R},
        ),
        lean=each(SPLIT, "time_projection.1"),
    ),
    "ChronoEditTransformer3DModel": Entry(heads=WAN_HEADS, plan=WAN, lean=TIME_PROJ),
    "SkyReelsV2Transformer3DModel": Entry(heads={"SkyReelsV2Attention": WIDTHS}, plan=WAN, lean=TIME_PROJ),
    "AnyFlowTransformer3DModel": Entry(heads={"AnyFlowAttention": OWN}, plan=WAN, lean=TIME_PROJ),
    "AnyFlowFARTransformer3DModel": Entry(
        heads={"AnyFlowAttention": OWN}, config=("num_attention_heads",), plan=WAN, lean=TIME_PROJ
    ),
    "HeliosTransformer3DModel": Entry(
        heads={"HeliosAttention": WIDTHS},
        plan=WAN | {"blocks.*.attn1.history_key_scale": Rule(Style.PARAMETER, dim=0)},
        lean=TIME_PROJ,
    ),
    # Hunyuan
    "HunyuanVideoTransformer3DModel": Entry(heads=HEADS, plan=DUAL | SINGLE | REFINER, lean=MODULATION_FLUX),
    "HunyuanVideoFramepackTransformer3DModel": Entry(heads=HEADS, plan=DUAL | SINGLE | REFINER, lean=MODULATION_FLUX),
    "HunyuanVideo15Transformer3DModel": Entry(heads=HEADS, plan=DUAL | REFINER, lean=MODULATION_12),
    "HunyuanImageTransformer2DModel": Entry(heads=HEADS, plan=DUAL | SINGLE | REFINER, lean=MODULATION_FLUX),
    "HunyuanDiT2DModel": Entry(
        raw=tuple(f"time_extra_emb.pooler.{name}_proj" for name in "qkvc"),  # a pool through torch's function
        heads=HEADS,
        plan=under("blocks.*", under("attn1", ATTENTION), under("attn2", ATTENTION), under("ff", FF)),
        lean=each(SPLIT, "blocks.*.norm1.linear", "blocks.*.skip_linear"),
    ),
    # LTX: norms across all heads, rope tables over them too
    "LTXVideoTransformer3DModel": Entry(
        heads={"LTXAttention": GENERAL},
        plan=under("transformer_blocks.*", under("attn1", WIDE), under("attn2", WIDE), under("ff", FF)),
        ropes={"transformer_blocks.*.attn1": ("image_rotary_emb",)},
        lean=each(SPLIT, "time_embed.linear"),
    ),
    "LTX2VideoTransformer3DModel": Entry(
        heads={"LTX2Attention": GENERAL},
        plan=LTX2,
        ropes={f"transformer_blocks.*.{name}": ("query_rotary_emb", "key_rotary_emb") for name in LTX2_ATTENTIONS},
        lean=each(SPLIT, "time_embed.linear", "audio_time_embed.linear", "av_cross_attn_video_scale_shift.linear"),
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Entry(
        heads={"SanaWMLTX2Attention": GENERAL},
        plan=LTX2,
        ropes={
            f"transformer_blocks.*.{name}": ("query_rotary_emb", "key_rotary_emb", "sink_rotary_emb")
            for name in LTX2_ATTENTIONS
        },
        lean=each(SPLIT, "time_embed.linear"),
    ),
    # CogVideoX, CogView
    "CogVideoXTransformer3DModel": Entry(heads=HEADS, plan=COGVIDEO, lean=MODULATION_COG),
    "ConsisIDTransformer3DModel": Entry(heads=HEADS, plan=COGVIDEO, lean=MODULATION_COG),
    "CogView3PlusTransformer2DModel": Entry(heads=HEADS, plan=COGVIDEO, lean=MODULATION_1),
    "CogView4Transformer2DModel": Entry(heads=HEADS, plan=COGVIDEO, lean=MODULATION_1),
    "GlmImageTransformer2DModel": Entry(heads=HEADS, plan=COGVIDEO, lean=MODULATION_1),
    # SD3, AuraFlow, PixArt and other early ones
    "SD3Transformer2DModel": Entry(
        heads=HEADS,
        plan=DUAL | under("transformer_blocks.*.attn2", ATTENTION),
        lean=MODULATION_12,
    ),
    "AuraFlowTransformer2DModel": Entry(
        heads=HEADS,
        plan=under(
            "joint_transformer_blocks.*",
            under("attn", JOINT),
            under("ff", AURAFLOW_FF),
            under("ff_context", AURAFLOW_FF),
        )
        | under("single_transformer_blocks.*", under("attn", ATTENTION), under("ff", AURAFLOW_FF)),
        lean=each(
            SPLIT,
            "joint_transformer_blocks.*.norm1.linear",
            "joint_transformer_blocks.*.norm1_context.linear",
            "single_transformer_blocks.*.norm1.linear",
        ),
    ),
    "PixArtTransformer2DModel": Entry(heads=HEADS, plan=BLOCKS_12),
    "LatteTransformer3DModel": Entry(
        heads=HEADS,
        plan=BLOCKS_12 | under("temporal_transformer_blocks.*", under("attn1", ATTENTION), under("ff", FF)),
    ),
    "AllegroTransformer3DModel": Entry(heads=HEADS, plan=BLOCKS_12),
    "SanaTransformer2DModel": Entry(heads=HEADS, plan=SANA),
    "SanaVideoTransformer3DModel": Entry(heads=HEADS, plan=SANA),
    # Flux's relatives
    "ChromaTransformer2DModel": Entry(
        plan=DUAL | SINGLE,
        lean=each(SPLIT, "distilled_guidance_layer.layers.*.linear_1", "distilled_guidance_layer.layers.*.linear_2"),
    ),
    "BriaTransformer2DModel": Entry(heads={"BriaAttention": OWN}, plan=DUAL | SINGLE, lean=MODULATION_FLUX),
    "BriaFiboTransformer2DModel": Entry(
        heads=HEADS | {"BriaFiboAttention": OWN}, plan=DUAL | SINGLE, lean=MODULATION_FLUX
    ),
    "LongCatImageTransformer2DModel": Entry(
        heads={"LongCatImageAttention": OWN}, plan=DUAL | SINGLE, lean=MODULATION_FLUX
    ),
    "OvisImageTransformer2DModel": Entry(
        heads={"OvisImageAttention": OWN, "OvisImageSingleTransformerBlock": ("mlp_hidden_dim",)},
        plan=under("transformer_blocks.*", under("attn", JOINT), under("ff", FF), under("ff_context", FF))
        | under("single_transformer_blocks.*", under("attn", QKV), {"proj_mlp": F, "proj_out": PR}),
        lean=MODULATION_FLUX,
    ),
    "Flux3Transformer2DModel": Entry(
        heads={"Flux3Attention": OWN},
        plan=under("mode_blocks.*.*", FLUX3_BLOCK)
        | under("txt_mode_blocks.*", FLUX3_BLOCK)
        | under("single_transformer_blocks.*", FLUX3_BLOCK),
        lean=each(SPLIT, "context_embedder"),
    ),
    # single stream
    "ZImageTransformer2DModel": Entry(
        heads=HEADS,
        plan={
            key: rule
            for blocks in ("layers", "noise_refiner", "context_refiner", "siglip_refiner")
            for key, rule in under(f"{blocks}.*", Z_IMAGE_BLOCK).items()
        },
        lean=each(SPLIT, "layers.*.adaLN_modulation.0", "noise_refiner.*.adaLN_modulation.0"),
    ),
    "BriaFibo2Transformer2DModel": Entry(
        heads={"BriaFibo2Attention": ("heads",)},
        plan=under("layers.*", FIBO2_BLOCK)
        | under("noise_refiner.*", FIBO2_BLOCK)
        | under(
            "perceiver.layers.*",
            under("cross_attention", ATTENTION),
            under("self_attention", ATTENTION),
            under("ffn", W123),
        ),
        lean=each(SPLIT, "layers.*.adaLN_modulation.0", "noise_refiner.*.adaLN_modulation.0"),
    ),
    "Lumina2Transformer2DModel": Entry(
        heads=HEADS,
        plan=under("layers.*", LUMINA2_BLOCK)
        | under("noise_refiner.*", LUMINA2_BLOCK)
        | under("context_refiner.*", LUMINA2_BLOCK),
        lean=each(SPLIT, "layers.*.norm1.linear", "noise_refiner.*.norm1.linear"),
    ),
    "LuminaNextDiT2DModel": Entry(
        heads=HEADS,
        plan=under(
            "layers.*",
            under("attn1", QKV, NORMS),
            under("attn2", WIDE),
            under("feed_forward", LINEAR_123),
            {"gate": Rule(Style.PARAMETER, dim=0)},
        ),
        handed_on=("layers.*.attn1",),  # attn2.to_out takes the sum of both
        lean=each(SPLIT, "layers.*.norm1.linear"),
    ),
    "Ideogram4Transformer2DModel": Entry(
        heads={"Ideogram4Attention": ("num_heads",)},
        plan=under("layers.*", Z_IMAGE_BLOCK),
        lean=each(SPLIT, "layers.*.adaln_modulation", "llm_cond_proj"),
    ),
    "Krea2Transformer2DModel": Entry(
        heads={"Krea2Attention": ("num_heads", "num_kv_heads")},
        plan=under("transformer_blocks.*", KREA2_BLOCK)
        | under("text_fusion.layerwise_blocks.*", KREA2_BLOCK)
        | under("text_fusion.refiner_blocks.*", KREA2_BLOCK),
        lean=each(SPLIT, "time_mod_proj"),
    ),
    "ErnieImageTransformer2DModel": Entry(
        heads={"ErnieImageAttention": OWN},
        plan=under(
            "layers.*",
            under("self_attention", ATTENTION),
            under("mlp", each(C, "gate_proj", "up_proj"), {"linear_fc2": R}),
        ),
    ),
    "OmniGenTransformer2DModel": Entry(
        heads={"Attention": (*GENERAL, "out_dim")},
        plan=under("layers.*", under("self_attn", ATTENTION), under("mlp", {"gate_up_proj": F, "down_proj": R})),
    ),
    "PRXTransformer2DModel": Entry(
        heads={"PRXAttention": OWN, "PRXBlock": ()},
        plan=under(
            "blocks.*",
            under("attention", {"img_qkv_proj": F, "txt_kv_proj": F, "to_out.0": R}),
            GATE_UP_DOWN,
        ),
        lean=each(SPLIT, "blocks.*.modulation.lin"),
    ),
    "JoyImageEditTransformer3DModel": Entry(heads={"JoyImageAttention": ("heads",)}, plan=JOYIMAGE, lean=TIME_PROJ),
    "JoyImageEditPlusTransformer3DModel": Entry(
        heads={"JoyImageEditPlusAttention": ("heads",)}, plan=JOYIMAGE, lean=TIME_PROJ
    ),
    # video and others
    "MochiTransformer3DModel": Entry(
        heads={"MochiAttention": OWN},
        plan=under("transformer_blocks.*", under("attn1", JOINT), under("ff", FF), under("ff_context", FF))
        | {"pos_frequencies": Rule(Style.PARAMETER, dim=1)},  # a learned rope for each head
        lean=MODULATION_12,
    ),
    "CosmosTransformer3DModel": Entry(
        heads={"Attention": (*GENERAL, "out_dim"), "CosmosAttention": (*GENERAL, "out_dim")},
        plan=BLOCKS_12 | under("transformer_blocks.*.attn2", each(C, "q_img", "k_img", "v_img")),
        lean=each(SPLIT, *(f"transformer_blocks.*.norm{i}.linear_{j}" for i in (1, 2, 3) for j in (1, 2))),
    ),
    "Cosmos3OmniTransformer": Entry(
        heads={"Cosmos3PackedMoTAttention": ("num_attention_heads", "num_key_value_heads")},
        plan=under(
            "layers.*",
            under("self_attn", PLAIN_OUT, ADDED),
            under("mlp", GATE_UP_DOWN),
            under("mlp_moe_gen", GATE_UP_DOWN),
        ),
    ),
    "HiDreamImageTransformer2DModel": Entry(
        heads={"HiDreamAttention": OWN},
        plan=under(
            "double_stream_blocks.*.block",
            under("attn1", HIDREAM_ATTENTION, HIDREAM_TEXT),
            HIDREAM_MOE,
            under("ff_t", W123),
        )
        | under("single_stream_blocks.*.block", under("attn1", HIDREAM_ATTENTION), HIDREAM_MOE),
        lean=each(
            SPLIT,
            "double_stream_blocks.*.block.adaLN_modulation.1",
            "single_stream_blocks.*.block.adaLN_modulation.1",
            "caption_projection.*.linear",
        ),
    ),
    "Kandinsky5Transformer3DModel": Entry(
        heads={"Kandinsky5Attention": ("num_heads",)},
        plan=under(
            "text_transformer_blocks.*",
            under("self_attention", LONG_NAMES),
            under("feed_forward", {"in_layer": C, "out_layer": R}),
        )
        | under(
            "visual_transformer_blocks.*",
            under("self_attention", LONG_NAMES),
            under("cross_attention", LONG_NAMES),
            under("feed_forward", {"in_layer": C, "out_layer": R}),
        ),
        lean=each(
            SPLIT,
            "visual_transformer_blocks.*.visual_modulation.out_layer",
            "text_transformer_blocks.*.text_modulation.out_layer",
        ),
    ),
    "Kandinsky6Transformer3DModel": Entry(
        heads={"Kandinsky6Attention": ("num_heads",)},
        plan={
            key: rule
            for blocks in ("video_text_transformer_blocks", "audio_text_transformer_blocks")
            for key, rule in under(f"{blocks}.*", under("attn", LONG_NAMES), under("feed_forward", FF)).items()
        }
        | under(
            "visual_transformer_blocks.*",
            under("video_dec_block", KANDINSKY6_BLOCK),
            under("audio_dec_block", KANDINSKY6_BLOCK),
            under("va_cross_attention", LONG_NAMES),
            under("av_cross_attention", LONG_NAMES),
        ),
        lean=each(
            SPLIT,
            "visual_transformer_blocks.*.video_dec_block.visual_modulation.out_layer",
            "visual_transformer_blocks.*.audio_dec_block.visual_modulation.out_layer",
            "visual_transformer_blocks.*.va_modulation.out_layer",
            "visual_transformer_blocks.*.av_modulation.out_layer",
            "video_text_transformer_blocks.*.text_modulation.out_layer",
            "audio_text_transformer_blocks.*.text_modulation.out_layer",
        ),
    ),
    "Kandinsky6SRTransformer3DModel": Entry(
        heads={"Kandinsky6SRAttention": ("num_heads",)},
        plan=under("visual_transformer_blocks.*", under("self_attention", LONG_NAMES), under("feed_forward", FF)),
        lean=each(SPLIT, "visual_transformer_blocks.*.visual_modulation.out_layer"),
    ),
    "EasyAnimateTransformer3DModel": Entry(
        heads=HEADS,
        plan=under("transformer_blocks.*", under("attn1", JOINT), under("ff", FF), under("txt_ff", FF)),
        lean=MODULATION_COG,
        refused=(
            Refused(
                "a block without text layers of its own hands attention output on unprojected",
                "transformer_blocks.*.attn1",
                lambda attention: attention.to_add_out is None,
            ),
        ),
    ),
    "MotifVideoTransformer3DModel": Entry(
        heads={"MotifVideoAttention": OWN, "MotifVideoCrossAttention": OWN},
        plan=DUAL | SINGLE | under("transformer_blocks.*.cross_attn", ATTENTION),
        lean=MODULATION_FLUX,
        refused=(
            Refused(
                "single blocks with text cross-attention feed it attention output before its projection",
                "single_transformer_blocks.*",
                lambda block: block.cross_attn is not None,
            ),
        ),
    ),
    "MiniMaxH3Transformer3DModel": Entry(
        heads={"MiniMaxH3Attention": ("heads",)},
        plan=under("transformer_blocks.*", under("attn", ATTENTION), under("ff", FF))
        | under("token_refiner.refiner_blocks.*", under("attn", ATTENTION), under("ff", FF)),
        lean=each(SPLIT, "transformer_blocks.*.adaln_proj.linear"),
    ),
    "MiniMaxMusic3Transformer1DModel": Entry(
        heads={"MiniMaxMusic3Attention": OWN},
        plan=under("transformer_blocks.*", under("attn", ATTENTION), {"ff_in": F, "ff_out": R}),
    ),
    "NucleusMoEImageTransformer2DModel": Entry(
        heads=HEADS,
        plan=under(
            "transformer_blocks.*",
            under("attn", ATTENTION, ADDED_KV),
            under("img_mlp", FF, under("shared_expert", FF)),
            {  # [experts, in, out]
                "img_mlp.experts.gate_up_proj": Rule(Style.PARAMETER, (1, 1), dim=2),
                "img_mlp.experts.down_proj": Rule(Style.PARAMETER, dim=1),
            },
        ),
        summed=("transformer_blocks.*.img_mlp.experts",),
        lean=each(SPLIT, "transformer_blocks.*.img_mod.1", "transformer_blocks.*.encoder_proj"),
    ),
    "AceStepTransformer1DModel": Entry(
        heads={"AceStepAttention": ("heads", "kv_heads")},
        plan=under(
            "layers.*", under("self_attn", ATTENTION), under("cross_attn", ATTENTION), under("mlp", GATE_UP_DOWN)
        ),
    ),
    "LongCatAudioDiTTransformer": Entry(
        heads={"AudioDiTAttention": OWN},
        plan=under(
            "blocks.*",
            under("self_attn", ATTENTION, each(N, "q_norm", "k_norm")),
            under("cross_attn", ATTENTION, each(N, "q_norm", "k_norm")),
            under("ffn.ff", {"0": C, "3": R}),
        ),
    ),
    "StableAudio3DiTModel": Entry(
        heads={"StableAudio3SelfAttention": ("heads",), "StableAudio3CrossAttention": ("heads",)},
        plan=under(
            "transformer_blocks.*",
            # differential attention: two queries, two keys, one value
            under("self_attn", {"to_qkv": F, "to_out": R}),
            under("cross_attn", {"to_q": F, "to_kv": F, "to_out": R}),
            under("ff", {"proj_in": F, "proj_out": R}),
        ),
    ),
    # --- text encoders
    "T5EncoderModel": Entry(library="transformers", checked=("5.24.0",), heads={"T5Attention": ("n_heads",)}, plan=T5),
    "UMT5EncoderModel": Entry(
        library="transformers", checked=("5.24.0",), heads={"UMT5Attention": ("n_heads", "inner_dim")}, plan=T5
    ),
}
