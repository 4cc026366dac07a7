"""A small random MiniMax-H3 transformer, its inputs and its sharding plan (diffusers ships none for this class)."""

from __future__ import annotations

import torch
from diffusers import MiniMaxH3Transformer3DModel

from shardconv.plans.catalogue import small_models

# As in the real model heads * head_dim (128) is larger than hidden_size (96), 3/4 of each head is rotated and
# time_embed_dim is half of hidden_size.
CONFIG = {
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "hidden_size": 96,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 256,
    "in_channels": 4,
    "audio_in_channels": 8,
    "patch_size": (1, 2, 2),
    "text_dim": 40,
    "freq_dim": 32,
    "time_embed_hidden_dim": 96,
    "time_embed_dim": 48,
    "rope_freq_dim": 2,
}

TEXT_ROWS = 8
VIDEO_GRID = (2, 2, 4)  # frames, rows and columns of video tokens
VIDEO_ROWS = 16
AUDIO_ROWS = 4
VIDEO, TEXT, AUDIO = 0, 1, 2  # the values of token_tags


def _block_plan(prefix: str) -> dict[str, object]:
    """The plan of the attention and the feed-forward that both kinds of block have."""
    return {
        f"{prefix}.attn.to_q": "colwise",
        f"{prefix}.attn.to_k": "colwise",
        f"{prefix}.attn.to_v": "colwise",
        f"{prefix}.attn.to_out.0": "rowwise",
        f"{prefix}.ff.net.0.proj": {"style": "packed_colwise", "blocks": [1, 1]},
        f"{prefix}.ff.net.2": "rowwise",
    }


MINIMAX_PLAN: dict[str, object] = {
    **_block_plan("token_refiner.refiner_blocks.*"),
    **_block_plan("transformer_blocks.*"),
    "transformer_blocks.*.adaln_proj.linear": "rowwise_split_input",
}


def build_minimax(seed: int = 0) -> torch.nn.Module:
    """The small model, all of it in float32, in eval mode, with the random weights of `seed`."""
    model = MiniMaxH3Transformer3DModel(**CONFIG)
    small_models.randomize(model, seed)
    return model.eval()


def minimax_inputs(seed: int = 1) -> dict[str, object]:
    """Keyword arguments for `model(**inputs, return_dict=False)`, which gives (video, audio).

    One packed sequence of text, audio, then video rows. The first video frame is a given picture at its own timestep.
    """
    generator = torch.Generator().manual_seed(seed)
    tags = torch.tensor([TEXT] * TEXT_ROWS + [AUDIO] * AUDIO_ROWS + [VIDEO] * VIDEO_ROWS)
    timestep_indices = torch.where(tags == AUDIO, 1, 0)
    timestep_indices[-VIDEO_ROWS : -VIDEO_ROWS // 2] = 2
    return {
        "hidden_states": torch.randn(1, VIDEO_ROWS, 16, generator=generator),
        "audio_hidden_states": torch.randn(1, AUDIO_ROWS, 8, generator=generator),
        "encoder_hidden_states": torch.randn(1, TEXT_ROWS, 40, generator=generator),
        "timestep": torch.tensor([0.75, 0.5, 0.0]),
        "timestep_indices": timestep_indices,
        "token_tags": tags,
        "position_ids": _position_ids(),
        "video_indices": (tags == VIDEO).nonzero()[:, 0],
        "audio_indices": (tags == AUDIO).nonzero()[:, 0],
        "text_indices": (tags == TEXT).nonzero()[:, 0],
    }


def _position_ids() -> torch.Tensor:
    """As the pipeline lays them out: text counts up in time, audio and video run side by side after it."""
    frames, rows, columns = VIDEO_GRID
    ids = torch.zeros(TEXT_ROWS + AUDIO_ROWS, 3, dtype=torch.long)
    ids[:, 0] = torch.arange(TEXT_ROWS + AUDIO_ROWS)
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns))
    return torch.cat([ids, grid + torch.tensor([TEXT_ROWS, 0, 0])])
