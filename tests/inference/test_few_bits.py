"""Models with values of few bits, or with token embeddings and head in 8 bits: computing, refusals, saving, loading."""

import copy
import pickle
from functools import cache

import pytest
import torch
from conftest import FEW, make_model
from packed import assert_close, assert_same_state, logits, make_zeroed
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
from optimum_neuronal.formats.codebooks import BITS
from optimum_neuronal.formats.int8_weight import Int8Weight
from optimum_neuronal.inference.coded_rows import CodedRows
from optimum_neuronal.inference.int8_rows import Int8Rows
from optimum_neuronal.inference.packed_embedding import PackedEmbedding, TiedLinear
from optimum_neuronal.inference.packed_linear import PackedLinear
from optimum_neuronal.inference.packed_rows import PackedRows
from optimum_neuronal.model.packed_modules import packed_modules


FILE = "packed-00001-of-00001.safetensors"
CODES, LEVELS = {"value_bits": 4}, {"embedding_bits": 8}


@cache
def _quantised(family, activations, sparsity, fields):
    return sparsify(zeroed(family, sparsity), activations=activations, **dict(fields))


def quantised(family="llama", activations="bf16", sparsity=0.7, **fields):
    """A model of one block, packed once and copied."""
    return copy.deepcopy(_quantised(family, activations, sparsity, tuple(fields.items())))


def zeroed(family="llama", sparsity=0.7):
    return make_zeroed(family, sparsity, num_hidden_layers=1)


def clone(model) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


def held(model) -> list:
    """Return the packed modules that hold quantised values."""
    return [module for _, module in packed_modules(model) if not isinstance(module.rows, PackedRows)]


@pytest.mark.parametrize("family", by_day([*FEW, "gpt_oss", "nemotron_h", "phi3"], "llama", "gpt2", "gpt_oss"))
def test_codes_compute_as_the_dense_model_of_the_same_values(family, ids):
    model = sparsify(make_zeroed(family), activations="bf16", **CODES)
    modules = [module for _, module in packed_modules(model)]
    assert modules and all(isinstance(module.rows, CodedRows) for module in modules)
    check_densified(model, CODES, ids)


def check_densified(model, fields, ids):
    found = logits(model, ids)
    assert_close(found, logits(densify(model), ids))
    state = clone(model)
    assert_same_state(densify(sparsify(model, **fields)), state), "what was rounded stays what it is"
    assert not list(packed_modules(model))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom", "gemma3_text", "mixtral", "phi"])
def test_levels_compute_as_the_dense_model_of_the_same_values(family, ids):
    """Tied ones are in memory once, and come back tied, of the same classes."""
    before = make_zeroed(family)
    table, head = before.get_input_embeddings(), before.get_output_embeddings()
    model = sparsify(copy.deepcopy(before), activations="bf16", **LEVELS)
    tied = table.weight is head.weight
    assert type(model.get_input_embeddings()) is PackedEmbedding
    assert type(model.get_output_embeddings()) is (TiedLinear if tied else PackedLinear)
    assert [type(module.rows) for module in held(model)] == [Int8Rows] * (2 - tied) and not model.packing.left_dense
    check_densified(model, LEVELS, ids)
    assert type(model.get_input_embeddings()) is type(table) and type(model.get_output_embeddings()) is type(head)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert torch.equal(model.get_input_embeddings().weight, Int8Weight.nearest(table.weight).unpack())
    assert model.state_dict().keys() == before.state_dict().keys()


@pytest.mark.parametrize("family", ["gemma", "gemma4_text", "biogpt", "xglm"])
def test_embeddings_that_are_scaled(family, ids):
    for dtype in (torch.float32, torch.bfloat16):
        model = sparsify(make_model(family).to(dtype), embedding_bits=8)
        found = model.get_input_embeddings()(ids)
        assert type(model.get_input_embeddings()) is PackedEmbedding
        assert torch.equal(found, densify(model).get_input_embeddings()(ids)) and found.dtype == dtype


def test_errors_and_sizes(ids):
    without = sparsify(zeroed())
    for value_bits in BITS:
        model = quantised(value_bits=value_bits)
        before = logits(zeroed(), ids)
        assert (logits(model, ids) - before).norm() / before.norm() < {8: 0.02, 4: 0.2, 3: 0.4, 2: 1.0}[value_bits]
        assert model.packing.packed_bytes < 0.5 * without.packing.packed_bytes
        check_rounded_inputs(model, ids, value_bits=value_bits)
    model, weight = quantised(**LEVELS), zeroed().lm_head.weight
    saved = 2 * (weight.nbytes - Int8Weight.nearest(weight).nbytes)
    assert without.get_memory_footprint() - model.get_memory_footprint() == saved
    check_rounded_inputs(model, ids, **LEVELS)


def check_rounded_inputs(model, ids, **fields):
    rounded = quantised(activations="int8", **fields)
    assert_close(logits(rounded, ids[:1, :4]), logits(model, ids[:1, :4]), 5e-2)
    assert f"value_bits={held(model)[0].rows.value_bits}, activations=bf16" in repr(held(model)[-1])


@pytest.mark.parametrize("family, fields", [("llama", CODES), ("gpt2", LEVELS)], ids=["codes", "levels"])
def test_moved_converted_copied_and_compiled(family, fields, ids):
    """Sharing survives; scales and levels are neither converted nor lost."""
    model = quantised(family, **fields)
    expected, other = logits(model, ids), quantised(family, sparsity=0.6, **fields)
    other.load_state_dict(model.state_dict())
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for again in (other, *copies):
        assert torch.equal(logits(again, ids), expected)
        if fields is LEVELS:
            assert again.lm_head.embedding is again.transformer.wte is not model.transformer.wte
    for half in (copies[0].to(torch.bfloat16), copies[1].half()):
        assert logits(half, ids).dtype == half.dtype == held(half)[0].weight.dtype
        assert_close(logits(half, ids).float(), expected, 3e-2)
        assert held(half)[0].rows.scales.dtype == (torch.uint8 if fields is CODES else torch.int16)
        for found, module in zip(held(half.float()), held(model), strict=True):
            assert torch.equal(found.dense(), module.dense())
    layers = [(model.lm_head, torch.randn(2, 32)), (model.transformer.wte, ids)] if fields is LEVELS else [
        (held(model)[0], torch.randn(2, held(model)[0].in_features))
    ]  # fmt: skip
    for module, x in layers:
        with torch.no_grad():
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), module(x))
    state = clone(held(model)[0])
    if fields is LEVELS:
        state["scales"].fill_(0xFF)
    else:
        state["codes"] = state["codes"][:-1]
    message = "its scales are not all finite" if fields is LEVELS else "its offsets go from 0"
    with pytest.raises(RuntimeError, match=f"is damaged: {message}"):
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
    model = zeroed()
    state = clone(model)
    for arguments, message in (
        ({"value_bits": 5}, "values of 5 bits are not known: expected one of 8, 4, 3, 2"),
        ({"embedding_bits": 4}, "embedding_bits is 4: expected 8"),
        ({"activations": "int4", **CODES}, "activations='int4': expected one of 'int8', 'bf16'"),
        ({"activations": "int4", **LEVELS}, "activations='int4'"),
    ):
        with pytest.raises(ValueError, match=message):
            sparsify(model, **arguments)
    assert_same_state(model, state)
    sparsify(model)
    for fields in (CODES, LEVELS):
        with pytest.raises(ValueError, match="packed already: call optimum_neuronal.densify"):
            sparsify(model, **fields)
    with pytest.raises(ValueError, match="packed"):
        keep_sparsity(quantised(**CODES))
    model = quantised(**LEVELS)
    with pytest.raises(ValueError, match="densify"):
        NeuronALPruner(NeuronALConfig(0.5, saliency="magnitude", topup="uniform")).prune(model)
    with pytest.raises(TypeError, match="PackedEmbedding', for inference only: call optimum_neuronal.densify"):
        model.resize_token_embeddings(100)
    for bad in (-1, 64):
        with pytest.raises((IndexError, RuntimeError)):
            logits(model, torch.tensor([[bad]]))


def test_training_is_refused(ids):
    for model in (quantised(**CODES), quantised(**LEVELS)):
        before = clone(model)
        with pytest.raises(RuntimeError, match="densify"):
            model.train()(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            model(input_ids=ids)
        assert_same_state(model, before)
    with pytest.raises(RuntimeError, match="call optimum_neuronal.densify"):
        model.get_input_embeddings()(ids)
    dense = sparsify(make_model("llama"), embedding_bits=8, activations="bf16")
    assert dense.packing.packed == 2, "it need not be sparse"
    with pytest.raises(RuntimeError, match="call optimum_neuronal.densify"):
        dense.train().lm_head(torch.randn(1, 32, requires_grad=True))


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "fields, name, spoil, why",
    [
        (CODES, UP, lambda m: m.model.layers[0].mlp.up_proj.weight.data.__setitem__((0, 0), torch.inf),
         "holds NaN or infinite values, which have no codes"),
        (LEVELS, "lm_head", lambda m: m.lm_head.weight.data.__setitem__((0, 0), torch.inf), "holds NaN or infinite"),
        (LEVELS, "lm_head", lambda m: setattr(m.lm_head, "forward", m.lm_head.forward), "its forward was replaced"),
        (LEVELS, "lm_head",
         lambda m: m.register_module("probe", torch.nn.Linear(1, 1)) or setattr(m.probe, "weight", m.lm_head.weight),
         "shares its weight with another module"),
    ],
)  # fmt: skip
def test_what_stays_dense_is_named(fields, name, spoil, why):
    model = zeroed()
    spoil(model)
    sparsify(model, **fields)
    assert why in model.packing.left_dense[name] and type(model.get_submodule(name)) is torch.nn.Linear
    if fields is CODES:
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


@pytest.mark.parametrize("family", by_day(["llama", "mixtral", "gpt2"], "mixtral", "gpt2"))
def test_saved_and_loaded_with_codes(family, tmp_path, ids):
    """The files hold the very codes, of which the loaded model is made."""
    model = sparsify(make_sparse(family), activations="bf16", **CODES)
    assert model.config.sparsity_config["value_bits"] == 4
    expected, dense = logits(model, ids), clone(densify(copy.deepcopy(model)))
    model.save_pretrained(tmp_path)
    loaded = SparseModelForCausalLM.from_pretrained(tmp_path, activations="bf16")
    assert all(isinstance(module.rows, CodedRows) for _, module in packed_modules(loaded))
    assert loaded.packing.packed == model.packing.packed
    assert_close(logits(loaded, ids), expected)
    assert_same_state(densify(loaded), dense)
    assert held(SparseModelForCausalLM.from_pretrained(tmp_path))[0].rows.activations == "int8"
    with pytest.raises(ValueError, match="activations='fp8'"):
        SparseModelForCausalLM.from_pretrained(tmp_path, activations="fp8")


def test_saved_where_nothing_tells_how_it_was_pruned(tmp_path):
    """The same values, as a packed model's are saved."""
    model = quantised(**CODES)
    model.save_pretrained(tmp_path)
    assert_same_state(densify(SparseModelForCausalLM.from_pretrained(tmp_path)), clone(densify(model)))


@pytest.mark.parametrize(
    "family, value_bits",
    by_day([("llama", 4), ("gpt2", None), ("gemma3_text", None), ("mixtral", None)], ("llama", 4), ("gpt2", None)),
)
def test_saved_loaded_and_saved_again(family, value_bits, tmp_path, ids):
    """Never dense in memory; the files are the same, whoever writes them."""
    fields = {"embedding_bits": 8, "value_bits": value_bits}
    pruner = NeuronALPruner(NeuronALConfig(0.6, saliency="magnitude", topup="uniform", **fields))
    pruner.save(pruner.prune(make_model(family).bfloat16()), tmp_path / "model", "packed")
    loaded = SparseModelForCausalLM.from_pretrained(tmp_path / "model", activations="bf16")
    assert isinstance(loaded.get_input_embeddings(), PackedEmbedding)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_close(logits(loaded, ids).float(), logits(dense, ids).float(), 2e-2)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == (tmp_path / "model" / FILE).read_bytes()
    save_pretrained(loaded, tmp_path / "dense", format="dense")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), clone(dense))
    assert_same_state(densify(loaded), clone(dense))


def test_a_model_in_memory_is_saved_with_8_bits(tmp_path, ids, monkeypatch):
    """As its sparsity_config tells from then on; in another dtype, values are what they were."""
    model = sparsify(make_sparse("gpt2"), activations="bf16", **LEVELS)
    about, expected = model.config.sparsity_config, logits(model, ids)
    assert about["embedding_bits"] == 8 and about["head_weights"] == ["transformer.wte.weight"]
    dense = clone(densify(copy.deepcopy(model)))
    model.save_pretrained(tmp_path / "model")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), dense)
    assert b"wte.weight.packed_codes" in (tmp_path / "model" / FILE).read_bytes()
    model.half().save_pretrained(tmp_path / "half")
    halves = {name: value.half() for name, value in dense.items()}
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto"), halves)
    # Where a tied head has another form, the weight that was read is unpacked for both, which stay tied.
    monkeypatch.setattr("optimum_neuronal.inference.head_packing.is_head", lambda module: False)
    loaded = SparseModelForCausalLM.from_pretrained(tmp_path / "model", activations="bf16")
    assert type(loaded.lm_head) is torch.nn.Linear and loaded.lm_head.weight is loaded.transformer.wte.weight
    assert_close(logits(loaded, ids), expected)
