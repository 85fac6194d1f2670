"""Models with quantized projections, or with token embeddings and head in 8 bits."""

import copy
import pickle

import pytest
import torch
from conftest import FEW, make_model
from packed_models import assert_close, assert_same_state, logits, make_zeroed, pack
from profiles import by_day

from optimum_neuronal import densify, sparsify
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import token_weights
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.packed_embedding import PackedEmbedding, TiedLinear
from optimum_neuronal.packed.packed_linear import PackedLinear
from optimum_neuronal.packed.packed_module import packed_modules
from optimum_neuronal.pruning.final_pass import put_quantized


NEAR, NEAR_HEAD = 1e-2, 3e-2  # kernels round inputs to whole numbers, for 8 bits coarsely


def quantized(family="llama", bits=None, embedding_bits=None):
    return pack(make_zeroed(family, num_hidden_layers=1), bits, embedding_bits)


def held(model) -> list:
    return [module for _, module in packed_modules(model) if module.format == "quantized"]


@pytest.mark.parametrize("family", by_day([*FEW, "gpt_oss", "nemotron_h", "phi3"], "llama", "gpt2", "gpt_oss"))
def test_computes_as_the_dense_model_of_the_same_numbers(family, ids):
    model = pack(make_zeroed(family), bits=4)
    assert held(model) and held(model)[0].matrix.bits == 4
    found = logits(model, ids)
    assert_close(found, logits(densify(model), ids), NEAR)
    assert not list(packed_modules(model))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom", "gemma3_text", "mixtral", "phi"])
def test_a_head_computes_as_the_dense_one_of_the_same_numbers(family, ids):
    """Tied ones are in memory once, and come back tied, of the same classes."""
    before = make_zeroed(family)
    table, head = before.get_input_embeddings(), before.get_output_embeddings()
    model = sparsify(copy.deepcopy(before), embedding_bits=8)
    tied = table.weight is head.weight
    assert type(model.get_input_embeddings()) is PackedEmbedding
    assert type(model.get_output_embeddings()) is (TiedLinear if tied else PackedLinear)
    assert len(held(model)) == 2 - tied and not model.packing.left_dense
    found = logits(model, ids)
    assert_close(found, logits(densify(model), ids), NEAR_HEAD)
    assert type(model.get_input_embeddings()) is type(table) and type(model.get_output_embeddings()) is type(head)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert torch.equal(model.get_input_embeddings().weight, QuantizedWeight.nearest(table.weight).unpack())
    assert model.state_dict().keys() == before.state_dict().keys()
    assert model.all_tied_weights_keys == before.all_tied_weights_keys


def test_the_head_of_a_packed_model_can_be_rounded_too(ids):
    model, expected = sparsify(make_zeroed()), logits(sparsify(make_zeroed(), embedding_bits=8), ids)
    assert torch.equal(logits(sparsify(model, embedding_bits=8), ids), expected)


@pytest.mark.parametrize("family", ["gemma", "gemma4_text", "biogpt", "xglm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_embeddings(family, dtype, ids):
    model = make_zeroed(family).to(dtype)
    sparsify(model, embedding_bits=8)
    found = model.get_input_embeddings()(ids)
    assert type(model.get_input_embeddings()) is PackedEmbedding
    assert torch.equal(found, densify(model).get_input_embeddings()(ids)) and found.dtype == dtype


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_quantized_weights_of_a_prune(family, ids):
    """With different bits and, where no experts share a weight, with steps; one projection was left out."""
    model = make_model(family)
    decoder, weights = find_decoder(model), {}
    for number, (name, projection) in enumerate(decoder.projections.items()):
        bits = 3 if projection.expert is not None else 2 + number % 4
        weights[name] = QuantizedWeight.nearest(projection.weight.contiguous(), bits)
    left_out = next(iter(weights)) if family == "llama" else None
    weights.pop(left_out, None)
    head = {name: QuantizedWeight.nearest(weight) for name, weight in token_weights(model).items()}
    expected = copy.deepcopy(model)
    for name, projection in find_decoder(expected).projections.items():
        if name in weights:
            weights[name].apply_to(projection.weight)
    for name, weight in token_weights(expected).items():
        head[name].apply_to(weight.data)
    put_quantized(decoder, weights, head)
    assert_close(logits(model, ids), logits(expected, ids), NEAR_HEAD)
    assert left_out is None or type(model.get_submodule(left_out)) is torch.nn.Linear
    assert_same_state(densify(model), {name: value.clone() for name, value in expected.state_dict().items()})


@pytest.mark.parametrize(
    "family, fields", [("llama", {"bits": 4}), ("gpt2", {"embedding_bits": 8})], ids=["projections", "head"]
)
def test_moved_converted_copied_and_compiled(family, fields, ids):
    """Sharing survives; scales and codes are neither converted nor lost."""
    model = quantized(family, **fields)
    expected = logits(model, ids)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for again in copies:
        assert torch.equal(logits(again, ids), expected)
        if family == "gpt2":
            assert again.lm_head.embedding is again.transformer.wte is not model.transformer.wte
    for half in (copies[0].to(torch.bfloat16), copies[1].half()):
        assert logits(half, ids).dtype == half.dtype == held(half)[0].weight.dtype
        assert_close(logits(half, ids).float(), expected, 3e-2)
        for found, module in zip(held(half.float()), held(model), strict=True):
            assert torch.equal(found.dense(), module.dense()) and found.matrix.scales.dtype == torch.bfloat16
    layers = [(model.lm_head, torch.randn(2, 32)), (model.transformer.wte, ids)] if family == "gpt2" else [
        (held(model)[0], torch.randn(2, held(model)[0].in_features))
    ]  # fmt: skip
    for module, x in layers:
        with torch.no_grad():
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize("spoil, why", [
    (lambda m: m.lm_head.weight.data.__setitem__((0, 0), torch.inf), "holds NaN or infinite"),
    (lambda m: setattr(m.lm_head, "forward", m.lm_head.forward), "its forward was replaced"),
])  # fmt: skip
def test_a_head_that_stays_dense_is_named(spoil, why):
    model = make_zeroed(num_hidden_layers=1)
    spoil(model)
    sparsify(model, embedding_bits=8)
    assert why in model.packing.left_dense["lm_head"] and type(model.lm_head) is torch.nn.Linear
    assert type(model.model.embed_tokens) is PackedEmbedding


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_tying_and_resizing_to_the_same_size_change_nothing(family, ids):
    model = sparsify(make_zeroed(family, tie_word_embeddings=True), embedding_bits=8)
    expected = logits(model, ids)
    model.tie_weights()
    model.resize_token_embeddings(model.config.vocab_size)
    assert torch.equal(logits(model, ids), expected) and type(model.get_output_embeddings()) is TiedLinear
    with pytest.raises(TypeError, match="PackedEmbedding"):
        model.resize_token_embeddings(model.config.vocab_size + 8)
    densify(model).resize_token_embeddings(model.config.vocab_size + 8)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
