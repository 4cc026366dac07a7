"""Small random models of the supported classes, for `shardconv demo` and the tests.

Each is the real diffusers class with a small configuration (2 blocks of each kind, 8 heads of 16 channels, a few
MB of float32 weights). The weights are random but the same for the same seed, and chosen so that every fault shows:
norm weights are far from 1, biases far from 0, and no two rows or columns are alike. Nothing is downloaded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HEADS = 8
HEAD_DIM = 16
CHANNELS = 16  # channels of one image token
TEXT_DIM = 48  # width of the text embeddings
POOLED_DIM = 24  # width of the pooled text embedding (flux only)
BATCH = 2
TEXT_TOKENS = 8
GRID = 4  # image tokens along each side

_CLASSES = {
    "flux": "FluxTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "qwenimage": "QwenImageTransformer2DModel",
    "qwenimage21": "QwenImage21Transformer2DModel",
}

NAMES: tuple[str, ...] = tuple(_CLASSES)

_COMMON: dict[str, object] = {
    "in_channels": CHANNELS,
    "num_layers": 2,
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_DIM,
}

_CONFIGS: dict[str, dict[str, object]] = {
    "flux": {
        "num_single_layers": 2,
        "joint_attention_dim": TEXT_DIM,
        "pooled_projection_dim": POOLED_DIM,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 6, 6),
    },
    "flux2": {
        "num_single_layers": 2,
        "joint_attention_dim": TEXT_DIM,
        "timestep_guidance_channels": 64,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    "qwenimage": {
        "out_channels": CHANNELS // 4,
        "joint_attention_dim": TEXT_DIM,
        "axes_dims_rope": (4, 6, 6),
    },
    "qwenimage21": {
        "out_channels": CHANNELS,
        "context_in_dim": TEXT_DIM,
        "axes_dims_rope": (4, 6, 6),
    },
}


def class_name(name: str) -> str:
    """The diffusers class of the small model called `name`."""
    if name not in _CLASSES:
        raise ValueError(f"no small model is called {name!r}; the names are {', '.join(NAMES)}")
    return _CLASSES[name]


def build(name: str, seed: int = 0) -> Any:
    """The small model called `name`, in float32 and eval mode, with the random weights of `seed`."""
    import diffusers

    model = getattr(diffusers, class_name(name))(**_COMMON, **_CONFIGS[name])
    randomize(model, seed)
    return model.eval()


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter of `model` in place with the random values of `seed`.

    Matrices and convolutions get variance 1 / fan-in, so that sizes carry over from layer to layer; norm weights get
    1 + 0.5 * N(0, 1); biases, embeddings and all other tables get N(0, 1).
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in done:  # shared by two modules
                    continue
                done.add(id(parameter))
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(_scaled(module, name, noise))


def _scaled(module: torch.nn.Module, name: str, noise: torch.Tensor) -> torch.Tensor:
    """Turn N(0, 1) noise into values fit for the parameter called `name` of `module`."""
    import torch

    if name == "gamma" or (name == "weight" and noise.ndim == 1):
        return 1 + 0.5 * noise
    if name == "weight" and not isinstance(module, torch.nn.Embedding):
        return noise / math.sqrt(noise[0].numel())  # noise[0] has the size of the fan-in
    return noise


def inputs(name: str, seed: int = 1) -> dict[str, object]:
    """Keyword arguments for `model(**inputs, return_dict=False)`, in the form the diffusers pipeline gives them.

    A batch of 2 with different timesteps, 4 x 4 image tokens and 8 text tokens.
    """
    import torch

    class_name(name)  # refuses unknown names
    generator = torch.Generator().manual_seed(seed)
    given: dict[str, object] = {
        "hidden_states": torch.randn(BATCH, GRID * GRID, CHANNELS, generator=generator),
        "encoder_hidden_states": torch.randn(BATCH, TEXT_TOKENS, TEXT_DIM, generator=generator),
        "timestep": torch.tensor([0.75, 0.25]),
    }
    if name == "flux":
        given["pooled_projections"] = torch.randn(BATCH, POOLED_DIM, generator=generator)
        given["guidance"] = torch.full([BATCH], 3.5)
        given["img_ids"] = _grid_ids(3)
        given["txt_ids"] = torch.zeros(TEXT_TOKENS, 3)
    elif name == "flux2":
        given["guidance"] = torch.full([BATCH], 4.0)
        given["img_ids"] = _grid_ids(4).expand(BATCH, -1, -1)
        given["txt_ids"] = _text_ids().expand(BATCH, -1, -1)
    elif name == "qwenimage":
        given["encoder_hidden_states_mask"] = _text_mask()
        given["img_shapes"] = [[(1, GRID, GRID)]] * BATCH
    else:
        given.update(_qwenimage21_inputs(generator))
    return given


def _grid_ids(axes: int) -> torch.Tensor:
    """Position ids of the image tokens: row and column on axes 1 and 2, zero elsewhere."""
    import torch

    ids = torch.zeros(GRID, GRID, axes)
    ids[..., 1] = torch.arange(GRID)[:, None]
    ids[..., 2] = torch.arange(GRID)[None, :]
    return ids.reshape(GRID * GRID, axes)


def _text_ids() -> torch.Tensor:
    """Position ids of the text tokens of flux2: the place in the text on the last of 4 axes."""
    import torch

    ids = torch.zeros(TEXT_TOKENS, 4)
    ids[:, 3] = torch.arange(TEXT_TOKENS)
    return ids


def _text_mask() -> torch.Tensor:
    """Which text tokens count: all in the first sample, all but the last two in the second."""
    import torch

    mask = torch.ones(BATCH, TEXT_TOKENS, dtype=torch.bool)
    mask[1, -2:] = False
    return mask


def _qwenimage21_inputs(generator: torch.Generator) -> dict[str, object]:
    """What qwenimage21 needs besides the text: image tokens that start with a 2 x 2 condition image.

    In `img_mask` each True stands for 4 image tokens: the third text place for the condition image, the places after
    the text for the image to make.
    """
    import torch

    img_mask = torch.zeros(BATCH, TEXT_TOKENS + GRID * GRID // 4, dtype=torch.bool)
    img_mask[:, 2] = True
    img_mask[:, TEXT_TOKENS:] = True
    return {
        "hidden_states": torch.randn(BATCH, 4 + GRID * GRID, CHANNELS, generator=generator),
        "encoder_hidden_states_mask": _text_mask(),
        "img_shapes": [[(1, 2, 2), (1, GRID, GRID)]] * BATCH,
        "img_mask": img_mask,
    }
