import pytest
import torch
from conftest import make_model
from transformers import AutoModel

from optimum_neuronal.model.token_weights import token_weights


@pytest.mark.parametrize(
    "family, overrides, expected",
    [
        ("llama", {}, ["model.embed_tokens.weight", "lm_head.weight"]),
        ("llama", {"tie_word_embeddings": True}, ["model.embed_tokens.weight"]),
        ("gpt2", {}, ["transformer.wte.weight"]),
        ("mixtral", {}, ["lm_head.weight", "model.embed_tokens.weight"]),
        ("gemma3_text", {}, ["model.embed_tokens.weight"]),
    ],
)
def test_by_their_names_in_the_files(family, overrides, expected):
    model = make_model(family, **overrides)
    found = token_weights(model)
    assert sorted(found) == sorted(expected) and any(
        weight is model.get_input_embeddings().weight for weight in found.values()
    )
    with torch.device("meta"):
        assert token_weights(type(model)(model.config)).keys() == found.keys()


def test_a_model_without_a_head(llama):
    assert list(token_weights(AutoModel.from_config(llama.config))) == ["embed_tokens.weight"]
