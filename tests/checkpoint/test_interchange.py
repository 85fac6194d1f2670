"""A dense pruned checkpoint is an ordinary one: other tools take it, and its zeros stay."""

import pytest
import torch
from conftest import make_tokenizer
from sparse_checkpoints import save_pruned
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig, pipeline


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interchange") / "llama"
    save_pruned(folder, tokenizer=make_tokenizer(), overrides={"vocab_size": 256, "num_hidden_layers": 1})
    return folder


def test_pipeline(directory):
    model = AutoModelForCausalLM.from_pretrained(directory)
    generate = pipeline("text-generation", model=str(directory), tokenizer=AutoTokenizer.from_pretrained(directory))
    found = generate("w1 w2 w3", max_new_tokens=4, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
    assert found == model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)[0].tolist()


def test_torchao_keeps_every_zero(directory):
    """Int8 weights are symmetric: zero is stored as zero. Tiny weights become zeros in addition."""
    torchao = pytest.importorskip("torchao.quantization")
    weights = AutoModelForCausalLM.from_pretrained(directory).named_parameters()
    before = {name: weight == 0 for name, weight in weights if "_proj" in name}
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    quantized = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config)
    assert "Int8" in type(quantized.model.layers[0].mlp.up_proj.weight).__name__
    for name, weight in quantized.named_parameters():
        if name in before:
            assert not weight.dequantize()[before[name]].any(), name
    assert quantized.config.sparsity_config["sparsity"] == 0.7
