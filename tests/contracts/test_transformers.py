"""What we use of transformers that it does not promise."""

from __future__ import annotations

import inspect

import pytest
import transformers
from contracts import Name
from transformers.models.t5 import modeling_t5
from transformers.models.umt5 import modeling_umt5

LIBRARY = "shardconv/libraries/transformers.py"
NAMES = [
    Name("transformers.PreTrainedModel._keep_in_fp32_modules", LIBRARY),
    Name("transformers.PreTrainedModel._keep_in_fp32_modules_strict", LIBRARY),
    Name("transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected", LIBRARY),
    Name("transformers.PreTrainedModel.config_class", LIBRARY),
    Name("transformers.PreTrainedModel.save_pretrained", LIBRARY),
    Name("transformers.PreTrainedModel.push_to_hub", LIBRARY),
    Name("transformers.PreTrainedModel.resize_token_embeddings", LIBRARY),
    Name("transformers.PreTrainedModel.add_adapter", LIBRARY),
    Name("transformers.PreTrainedModel.load_adapter", LIBRARY),
    Name("transformers.PretrainedConfig.from_dict", LIBRARY, ("config_dict",)),
]


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_each_name_stands(name: Name) -> None:
    """The name is there, takes what we pass, and is used where the table says."""
    name.check()


@pytest.mark.parametrize("module", [modeling_t5, modeling_umt5], ids=lambda module: module.__name__.rpartition(".")[2])
def test_attention_tells_heads_by_their_width(module: object) -> None:
    """T5's attention views by the width of a head, which stays; what it stores of counts is made local."""
    (attention,) = (cls for name, cls in vars(module).items() if name in ("T5Attention", "UMT5Attention"))
    assert "self.key_value_proj_dim" in inspect.getsource(attention.forward)
    assert "self.n_heads" in inspect.getsource(attention)


def test_the_embedding_is_tied() -> None:
    """Checkpoints of T5 hold `shared` alone; the skeleton has it and `encoder.embed_tokens` as one parameter."""
    config = transformers.T5Config(d_model=8, d_ff=8, d_kv=4, num_heads=2, num_layers=1, vocab_size=10)
    model = transformers.T5EncoderModel(config)
    assert model.shared.weight is model.encoder.embed_tokens.weight
