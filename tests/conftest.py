"""Tiny models of every supported family, made from the installed transformers' own config classes."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches the network

import pytest
import torch
import transformers
from texts import VOCAB
from tokenizers import Tokenizer, models, pre_tokenizers


torch.set_num_threads(1)  # models as small as these only lose by more

VOCABULARY, HIDDEN, LAYERS = 64, 32, 3

_SHAPES = dict(
    vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip
FAMILIES = {
    "llama": {},
    "mistral": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "phi": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN},
    "gpt2": {"n_inner": 48},
    "gpt_neox": {},
}


def make_model(family: str, seed: int = 0, **overrides) -> transformers.PreTrainedModel:
    """A randomly initialised model of a family, in float32; larger weights than usual, so that blocks matter."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**_SHAPES, **FAMILIES[family], **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(params=sorted(FAMILIES))
def any_model(request) -> transformers.PreTrainedModel:
    return make_model(request.param)


@pytest.fixture
def llama() -> transformers.PreTrainedModel:
    return make_model("llama")


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids of 12 sequences of 16 tokens."""
    return torch.randint(0, VOCABULARY, (12, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def tokenizer():
    """The word "w7" is the id 7, anything else 255; it warns above 4 tokens, as that is what its model admits."""
    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"<unk>": VOCAB - 1}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", model_max_length=4)
