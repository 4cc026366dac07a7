"""Small complete diffusers pipelines with random weights, built without any download.

Every component is the real class, so `save_pretrained` writes the same folders as a real model has. The transformers
are those of `shardconv.plans.catalogue.small_models`.
"""

from __future__ import annotations

import torch
import transformers
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    FluxPipeline,
    QwenImagePipeline,
)

from shardconv.plans.catalogue import small_models

LATENT_CHANNELS = small_models.CHANNELS // 4  # the pipelines pack 2 x 2 latents into one token
SIZE = 64  # pixels of the image; 16 tokens
TEXT_TOKENS = 8
LAYER_DIM = small_models.TEXT_DIM // 3  # flux2 joins three layers of its text encoder

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ENCODER = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_VAE_BLOCKS = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 8, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": LATENT_CHANNELS,
    "sample_size": SIZE,
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
)


def build_flux_pipeline() -> FluxPipeline:
    """FLUX.1, with CLIP and T5."""
    vae = AutoencoderKL(**_VAE_BLOCKS, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False)
    clip_config = transformers.CLIPTextConfig(
        **_ENCODER, vocab_size=64, hidden_size=small_models.POOLED_DIM, bos_token_id=0, eos_token_id=1
    )
    t5_config = transformers.T5Config(
        vocab_size=64, d_model=small_models.TEXT_DIM, d_kv=12, d_ff=64, num_layers=2, num_heads=4
    )
    return _quiet(
        FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=_vae(vae),
            text_encoder=_random(transformers.CLIPTextModel(clip_config), 11),
            tokenizer=_clip_tokenizer(),
            text_encoder_2=_random(transformers.T5EncoderModel(t5_config), 12),
            tokenizer_2=_t5_tokenizer(),
            transformer=small_models.build("flux"),
        )
    )


def build_flux2_pipeline() -> Flux2Pipeline:
    """FLUX.2, with Mistral 3; its processor is a plain tokenizer, as the real one needs torchvision."""
    vae = AutoencoderKLFlux2(**_VAE_BLOCKS)
    vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, small_models.CHANNELS))
    vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, small_models.CHANNELS))
    text = _ENCODER | {"model_type": "mistral", "vocab_size": 64, "hidden_size": LAYER_DIM, "head_dim": 4}
    vision = _ENCODER | {"model_type": "pixtral", "hidden_size": 16, "head_dim": 4, "image_size": 28, "patch_size": 14}
    config = transformers.Mistral3Config(
        text_config=text | {"num_key_value_heads": 2}, vision_config=vision, tie_word_embeddings=False
    )
    return _quiet(
        Flux2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=_vae(vae),
            text_encoder=_random(transformers.Mistral3ForConditionalGeneration(config), 13),
            tokenizer=_chat_tokenizer(),
            transformer=small_models.build("flux2"),
        )
    )


def build_qwenimage_pipeline() -> QwenImagePipeline:
    """Qwen-Image, with Qwen 2.5 VL."""
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        num_res_blocks=1,
        latents_mean=[-0.75, 0.1, 0.5, -0.2],
        latents_std=[2.8, 1.5, 2.3, 1.2],
    )
    text = _ENCODER | {"model_type": "qwen2_5_vl_text", "vocab_size": 320, "hidden_size": small_models.TEXT_DIM}
    text |= {"num_key_value_heads": 2, "bos_token_id": 256, "eos_token_id": 258}
    rope = {"rope_type": "default", "type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1000000.0}
    vision = {"model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config=vision | {"out_hidden_size": small_models.TEXT_DIM},
    )
    return _quiet(
        QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=True),
            vae=_vae(vae),
            text_encoder=_random(transformers.Qwen2_5_VLForConditionalGeneration(config), 14),
            tokenizer=_qwen_tokenizer(),
            transformer=small_models.build("qwenimage"),
        )
    )


def call_kwargs(kind: str) -> dict[str, object]:
    """What to call the pipeline with ("flux", "flux2" or "qwenimage"), besides `generator`: two 64 x 64 images.

    The prompts are given as embeddings. Qwen-Image also gets negative prompts, so it runs its transformer twice a step.

    There are two prompts because a product with a single row is computed another way, in another order, when a weight
    does not start at a multiple of 64 bytes. A model loaded from a file would then differ by 1e-6 from the one saved.
    """
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randn(2, TEXT_TOKENS, small_models.TEXT_DIM, generator=generator)
    given: dict[str, object] = {"height": SIZE, "width": SIZE, "num_inference_steps": 2, "prompt_embeds": prompts}
    if kind == "flux":
        given["pooled_prompt_embeds"] = torch.randn(2, small_models.POOLED_DIM, generator=generator)
    elif kind == "qwenimage":
        mask = torch.ones(2, TEXT_TOKENS, dtype=torch.long)
        mask[1, -2:] = 0  # the second prompt is shorter
        given["prompt_embeds_mask"] = mask
        given["negative_prompt_embeds"] = torch.randn(prompts.shape, generator=generator)
        given["negative_prompt_embeds_mask"] = mask
    elif kind != "flux2":
        raise ValueError(f"no small pipeline is called {kind!r}")
    return given


def _random(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    small_models.randomize(model, seed)
    return model.eval()


def _vae(vae: torch.nn.Module) -> torch.nn.Module:
    """Random weights with a weak last layer, so that few pixels are clipped to black or white."""
    small_models.randomize(vae, 10)
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(0.5)
        vae.decoder.conv_out.bias.zero_()
    return vae.eval()


def _quiet(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _clip_tokenizer() -> transformers.CLIPTokenizer:
    """Each letter is a token, and once more at the end of a word."""
    names = ["<|startoftext|>", "<|endoftext|>", *_LETTERS, *(f"{letter}</w>" for letter in _LETTERS)]
    vocab = {name: i for i, name in enumerate(names)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def _t5_tokenizer() -> transformers.T5TokenizerFast:
    """Each letter is a token, as is the mark of a new word."""
    vocab = [(name, 0.0) for name in ("<pad>", "</s>", "<unk>", "▁")] + [(letter, -2.0) for letter in _LETTERS]
    return transformers.T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=512)


def _chat_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Each letter is a token; a message is the text of its parts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", "<pad>", *_LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", chat_template=_CHAT_TEMPLATE
    )


def _qwen_tokenizer() -> transformers.Qwen2Tokenizer:
    """Each byte is a token."""
    from tokenizers.pre_tokenizers import ByteLevel

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {name: i for i, name in enumerate([*sorted(ByteLevel.alphabet()), *special])}
    return transformers.Qwen2Tokenizer(vocab=vocab, merges=[], additional_special_tokens=special[1:])
