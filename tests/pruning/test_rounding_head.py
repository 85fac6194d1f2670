"""Embeddings and head in 8 bits."""

import pytest
import torch
from conftest import make_model
from trial_helpers import state

from optimum_neuronal import NeuronALConfig, NeuronALPruner, densify
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.packed_module import packed_modules


def config(**fields):
    return NeuronALConfig(0.5, **{"saliency": "magnitude", "topup": "uniform", "embedding_bits": 8, **fields})


def test_embeddings_and_head_are_rounded_in_memory_and_projections_pruned_as_without(llama):
    before, other = state(llama), make_model("llama")
    assert {"model.embed_tokens", "lm_head"} == {
        name for name, _ in packed_modules(NeuronALPruner(config()).prune(llama))
    }
    densify(llama)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(llama.get_parameter(name), QuantizedWeight.nearest(before[name]).unpack())
    assert torch.equal(llama.model.norm.weight, before["model.norm.weight"])
    NeuronALPruner(config(embedding_bits=None)).prune(other)
    assert torch.equal(llama.model.layers[1].mlp.up_proj.weight, other.model.layers[1].mlp.up_proj.weight)


def test_tied_ones_stay_tied():
    model = make_model("gpt2")
    pruner = NeuronALPruner(config())
    pruner.prune(model)
    assert model.lm_head.embedding is model.transformer.wte
    densify(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert list(pruner.report.head_roundings) == ["transformer.wte.weight"]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda m: m.lm_head.weight.data.fill_(torch.nan), "weights of lm_head.weight contain NaN"),
        (lambda m: m.model.embed_tokens.to(torch.float64), "embed_tokens.weight has dtype torch.float64"),
        (
            lambda m: m.model.embed_tokens.to("meta"),
            "embed_tokens.weight in memory, and it is offloaded: leave embedding_bits out",
        ),
    ],
)
def test_what_cannot_be_rounded_raises_before_any_work(llama, spoil, message, monkeypatch):
    spoil(llama)
    monkeypatch.setattr("optimum_neuronal.pruning.prune.find_changes", lambda *args: pytest.fail("work began"))
    before = state(llama)
    with pytest.raises(ValueError, match=message):
        NeuronALPruner(config()).prune(llama)
    assert all(
        torch.equal(w, before[n]) for n, w in llama.state_dict().items() if not w.is_meta and "lm_head" not in n
    )
