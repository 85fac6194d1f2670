"""Models with quantised projections, or with token embeddings and head in 8 bits: computing, refusals, saving, loading."""

import copy
import pickle
from functools import cache

import pytest
import torch
from conftest import FEW, make_model
from packed_models import assert_close, assert_same_state, logits, make_zeroed
from profiles import by_day
from sparse import make_sparse
from transformers import AutoModelForCausalLM

from optimum_neuronal import (
    NeuronALConfig,
    NeuronALPruner,
    SparseModelForCausalLM,
    densify,
    keep_sparsity,
    save_pretrained,
    sparsify,
)
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.packed_modules import packed_modules
from optimum_neuronal.model.weight_names import token_weights
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.packed_embedding import PackedEmbedding, TiedLinear
from optimum_neuronal.packed.packed_linear import PackedLinear
from optimum_neuronal.packed.sparsify import put_quantized


FILE = "packed-00001-of-00001.safetensors"
FEW_BITS, HEAD = {"bits": 4}, {"embedding_bits": 8}
NEAR, NEAR_HEAD = 1e-2, 3e-2  # kernels round inputs to whole numbers, for 8 bits coarsely


@cache
def _quantised(family, fields):
    return sparsify(make_zeroed(family, num_hidden_layers=1), **dict(fields))


def quantised(family="llama", **fields):
    """Return a model of one block, packed once and copied."""
    return copy.deepcopy(_quantised(family, tuple(fields.items())))


def clone(model) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


def held(model) -> list:
    """Return the packed modules that hold quantised weights."""
    return [module for _, module in packed_modules(model) if module.format == "quantized"]


@pytest.mark.parametrize("family", by_day([*FEW, "gpt_oss", "nemotron_h", "phi3"], "llama", "gpt2", "gpt_oss"))
def test_computes_as_the_dense_model_of_the_same_numbers(family, ids):
    model = sparsify(make_zeroed(family), **FEW_BITS)
    assert held(model) and "bits=4" in repr(held(model)[0]) and not model.packing.left_dense
    found = logits(model, ids)
    assert_close(found, logits(densify(model), ids), NEAR)
    assert not list(packed_modules(model))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom", "gemma3_text", "mixtral", "phi"])
def test_a_head_computes_as_the_dense_one_of_the_same_numbers(family, ids):
    """Tied ones are in memory once, and come back tied, of the same classes."""
    before = make_zeroed(family)
    table, head = before.get_input_embeddings(), before.get_output_embeddings()
    model = sparsify(copy.deepcopy(before), **HEAD)
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


@pytest.mark.parametrize("family", ["gemma", "gemma4_text", "biogpt", "xglm"])
def test_embeddings_that_are_scaled(family, ids):
    for dtype in (torch.float32, torch.bfloat16):
        model = sparsify(make_model(family).to(dtype), embedding_bits=8)
        found = model.get_input_embeddings()(ids)
        assert type(model.get_input_embeddings()) is PackedEmbedding
        assert torch.equal(found, densify(model).get_input_embeddings()(ids)) and found.dtype == dtype


def test_errors_and_sizes(ids):
    before, dense = make_zeroed(num_hidden_layers=1), logits(make_zeroed(num_hidden_layers=1), ids)
    sizes = []
    for bits, most in {8: 0.02, 6: 0.1, 4: 0.3, 3: 0.6, 2: 1.2}.items():
        model = quantised(bits=bits)
        assert (logits(model, ids) - dense).norm() / dense.norm() < most
        sizes.append(model.packing.packed_bytes)
    assert sizes[1:] == sorted(sizes[1:], reverse=True) and sizes[-1] < 0.2 * model.packing.dense_bytes
    model, weight = quantised(**HEAD), before.lm_head.weight
    saved = 2 * (weight.nbytes - QuantizedWeight.nearest(weight).nbytes)
    assert quantised().get_memory_footprint() - model.get_memory_footprint() == saved


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_weights_that_a_prune_has_quantised_are_put_in_place(family, ids):
    """Some of them, with different bits and, where no experts share a weight, with steps."""
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
    put_quantized(model, decoder, weights, head)
    assert_close(logits(model, ids), logits(expected, ids), NEAR_HEAD)
    assert left_out is None or type(model.get_submodule(left_out)) is torch.nn.Linear
    assert_same_state(densify(model), clone(expected))


@pytest.mark.parametrize("family, fields", [("llama", FEW_BITS), ("gpt2", HEAD)], ids=["projections", "head"])
def test_moved_converted_copied_and_compiled(family, fields, ids):
    """Sharing survives; scales and codes are neither converted nor lost."""
    model = quantised(family, **fields)
    expected, other = logits(model, ids), sparsify(make_zeroed(family, 0.6, num_hidden_layers=1), **fields)
    other.load_state_dict(model.state_dict())
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for again in (other, *copies):
        assert torch.equal(logits(again, ids), expected)
        if fields is HEAD:
            assert again.lm_head.embedding is again.transformer.wte is not model.transformer.wte
    for half in (copies[0].to(torch.bfloat16), copies[1].half()):
        assert logits(half, ids).dtype == half.dtype == held(half)[0].weight.dtype
        assert_close(logits(half, ids).float(), expected, 3e-2)
        assert held(half)[0].matrix.scales.dtype == torch.bfloat16
        for found, module in zip(held(half.float()), held(model), strict=True):
            assert torch.equal(found.dense(), module.dense())
    layers = [(model.lm_head, torch.randn(2, 32)), (model.transformer.wte, ids)] if fields is HEAD else [
        (held(model)[0], torch.randn(2, held(model)[0].in_features))
    ]  # fmt: skip
    for module, x in layers:
        with torch.no_grad():
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), module(x))
    state = clone(held(model)[0])
    state["scales"].fill_(0xFF)
    with pytest.raises(RuntimeError, match="is damaged: its scales reach from"):
        held(model)[0].load_state_dict(state)


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "llama"])
def test_a_tied_head_stays_tied_and_embeddings_that_it_shares_are_not_replaced(family, ids):
    original = sparsify(make_zeroed(family), embedding_bits=8)
    expected, head = logits(original, ids), type(original.get_output_embeddings())
    for model in (original, copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        model.tie_weights()
        model.set_input_embeddings(model.get_input_embeddings())
        if head is TiedLinear:
            for part in (model, model.base_model):
                with pytest.raises(
                    ValueError, match="tied to the packed token embeddings: .* call optimum_neuronal.den"
                ):
                    part.set_input_embeddings(torch.nn.Embedding(64, 32))
        assert torch.equal(logits(model, ids), expected) and type(model.get_output_embeddings()) is head
    dense, table = densify(original), torch.nn.Embedding(64, 32)
    dense.set_input_embeddings(table)
    dense.tie_weights()
    assert dense.get_input_embeddings() is table
    assert (dense.get_output_embeddings().weight is table.weight) == (head is TiedLinear)


def test_what_is_refused(ids):
    model = make_zeroed(num_hidden_layers=1)
    state = clone(model)
    for arguments, message in (
        ({"bits": 9}, "bits"),
        ({"bits": 1}, "bits"),
        ({"embedding_bits": 4}, "embedding_bits is 4"),
    ):
        with pytest.raises(ValueError, match=message):
            sparsify(model, **arguments)
    assert_same_state(model, state)
    sparsify(model)
    for fields in (FEW_BITS, HEAD):
        with pytest.raises(ValueError, match="packed already: call optimum_neuronal.densify"):
            sparsify(model, **fields)
    with pytest.raises(ValueError, match="packed"):
        keep_sparsity(quantised(**FEW_BITS))
    model = quantised(**HEAD)
    with pytest.raises(ValueError, match="densify"):
        NeuronALPruner(NeuronALConfig(0.5, saliency="magnitude", topup="uniform")).prune(model)
    with pytest.raises(TypeError, match="PackedEmbedding', for inference only: call optimum_neuronal.densify"):
        model.resize_token_embeddings(100)
    for bad in (-1, 64):
        with pytest.raises((IndexError, RuntimeError)):
            logits(model, torch.tensor([[bad]]))


def test_a_model_without_its_zeros_is_no_pruned_one():
    model = sparsify(make_sparse("llama"), **FEW_BITS)
    assert not hasattr(model.config, "sparsity_config")
    assert hasattr(sparsify(make_sparse("llama")).config, "sparsity_config")


def test_training_is_refused(ids):
    for model in (quantised(**FEW_BITS), quantised(**HEAD)):
        before = clone(model)
        with pytest.raises(RuntimeError, match="densify"):
            model.train()(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            model(input_ids=ids)
        assert_same_state(model, before)
    with pytest.raises(RuntimeError, match="call optimum_neuronal.densify"):
        model.get_input_embeddings()(ids)
    dense = sparsify(make_model("llama"), embedding_bits=8)
    assert dense.packing.packed == 2, "it need not be sparse"
    with pytest.raises(RuntimeError, match="call optimum_neuronal.densify"):
        dense.train().lm_head(torch.randn(1, 32, requires_grad=True))


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "fields, name, spoil, why",
    [
        (FEW_BITS, UP, lambda m: m.model.layers[0].mlp.up_proj.weight.data.__setitem__((0, 0), torch.inf),
         "holds NaN or infinite values, which cannot be quantised"),
        (HEAD, "lm_head", lambda m: m.lm_head.weight.data.__setitem__((0, 0), torch.inf), "holds NaN or infinite"),
        (HEAD, "lm_head", lambda m: setattr(m.lm_head, "forward", m.lm_head.forward), "its forward was replaced"),
        (HEAD, "lm_head",
         lambda m: m.register_module("probe", torch.nn.Linear(1, 1)) or setattr(m.probe, "weight", m.lm_head.weight),
         "shares its weight with another module"),
    ],
)  # fmt: skip
def test_what_stays_dense_is_named(fields, name, spoil, why):
    model = make_zeroed(num_hidden_layers=1)
    spoil(model)
    sparsify(model, **fields)
    assert why in model.packing.left_dense[name] and type(model.get_submodule(name)) is torch.nn.Linear
    if fields is FEW_BITS:
        assert list(model.packing.left_dense) == [name]
    else:
        assert type(model.model.embed_tokens) is PackedEmbedding


def test_embeddings_of_another_kind_stay_dense_and_the_tied_head_with_them():
    class Own(torch.nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) + 1

    model = make_zeroed("gpt2")
    model.transformer.wte.__class__ = Own
    sparsify(model, embedding_bits=8)
    assert "has no packed form" in model.packing.left_dense["transformer.wte"]
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("family", by_day(["llama", "mixtral", "gpt2", "gpt_oss"], "mixtral", "gpt2"))
@pytest.mark.parametrize("fields", [FEW_BITS, FEW_BITS | HEAD], ids=["projections", "and head"])
def test_saved_and_loaded(family, fields, tmp_path, ids):
    """Quantised weights stay packed, whatever loads them, and the files are the same, whatever writes them."""
    model = sparsify(make_sparse(family), **fields)
    expected, dense = logits(model, ids), clone(densify(copy.deepcopy(model)))
    model.save_pretrained(tmp_path / "model")
    for loader in (AutoModelForCausalLM, SparseModelForCausalLM):
        loaded = loader.from_pretrained(tmp_path / "model")
        assert len(held(loaded)) == len(held(model)) and loaded.packing.packed == model.packing.packed
        assert torch.equal(logits(loaded, ids), expected)
        loaded.save_pretrained(tmp_path / "again")
        assert (tmp_path / "again" / FILE).read_bytes() == (tmp_path / "model" / FILE).read_bytes()
    save_pretrained(loaded, tmp_path / "dense", format="dense")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), dense)
    assert_same_state(densify(loaded), dense)


def test_sparse_weights_beside_a_quantised_head(tmp_path, ids, monkeypatch):
    """As the sparsity_config tells from then on. AutoModel unpacks the sparse ones, so that they can be trained."""
    model = sparsify(make_sparse("gpt2"), **HEAD)
    about, expected = model.config.sparsity_config, logits(model, ids)
    assert about["embedding_bits"] == 8 and about["head_weights"] == ["transformer.wte.weight"]
    dense = clone(densify(copy.deepcopy(model)))
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(list(packed_modules(loaded))) == len(held(loaded)) == 1 and not loaded.packing.left_dense
    assert_close(logits(loaded, ids), expected, NEAR_HEAD)
    assert_same_state(densify(loaded), dense)
    assert b"wte.weight.packed_codes" in (tmp_path / "model" / FILE).read_bytes()
    # Where a tied head has another form, the weight that was read is unpacked for both, which stay tied.
    monkeypatch.setattr("optimum_neuronal.packed.head_packing.is_head", lambda module: False)
    loaded = SparseModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded.lm_head) is torch.nn.Linear and loaded.lm_head.weight is loaded.transformer.wte.weight
    assert_close(logits(loaded, ids), expected, NEAR_HEAD)
