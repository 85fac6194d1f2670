"""Models whose token embeddings and head are held in 8 bits: computing, refusals, saving and loading."""

import copy
import pickle

import pytest
import torch
from conftest import make_model
from packed import assert_close, assert_same_state, logits, make_zeroed
from profiles import by_day
from sparse import make_sparse
from transformers import AutoModelForCausalLM

from optimum_neuronal import NeuronALConfig, NeuronALPruner, SparseModelForCausalLM, densify, save_pretrained, sparsify
from optimum_neuronal.formats.int8_weight import Int8Weight
from optimum_neuronal.inference.int8_rows import Int8Rows
from optimum_neuronal.inference.packed_embedding import PackedEmbedding, TiedLinear
from optimum_neuronal.inference.packed_linear import PackedLinear
from optimum_neuronal.model.packed_modules import packed_modules


FILE = "packed-00001-of-00001.safetensors"


def in_8_bits(family="llama", activations="bf16", **overrides):
    return sparsify(make_zeroed(family, **overrides), embedding_bits=8, activations=activations)


def clone(model) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom", "gemma3_text", "mixtral", "phi"])
def test_as_the_dense_model_of_the_same_values(family, ids):
    """Tied ones are in memory once, and come back tied, of the same classes."""
    before = make_zeroed(family)
    table, head = before.get_input_embeddings(), before.get_output_embeddings()
    model = sparsify(copy.deepcopy(before), embedding_bits=8, activations="bf16")
    tied = table.weight is head.weight
    assert type(model.get_input_embeddings()) is PackedEmbedding
    assert type(model.get_output_embeddings()) is (TiedLinear if tied else PackedLinear)
    held = [module for _, module in packed_modules(model) if isinstance(module.rows, Int8Rows)]
    assert len(held) == 2 - tied and not model.packing.left_dense
    found = logits(model, ids)
    dense = densify(model)
    assert_close(found, logits(dense, ids))
    assert type(dense.get_input_embeddings()) is type(table) and type(dense.get_output_embeddings()) is type(head)
    assert (dense.get_input_embeddings().weight is dense.get_output_embeddings().weight) == tied
    assert torch.equal(dense.get_input_embeddings().weight, Int8Weight.nearest(table.weight).unpack())
    assert dense.state_dict().keys() == before.state_dict().keys()
    assert_same_state(densify(sparsify(dense, embedding_bits=8)), clone(dense)), "what was rounded stays what it is"


@pytest.mark.parametrize("family", ["gemma", "gemma4_text", "biogpt", "xglm"])
def test_embeddings_that_are_scaled(family, ids):
    for dtype in (torch.float32, torch.bfloat16):
        model = sparsify(make_model(family).to(dtype), embedding_bits=8)
        found = model.get_input_embeddings()(ids)
        assert type(model.get_input_embeddings()) is PackedEmbedding
        assert torch.equal(found, densify(model).get_input_embeddings()(ids)) and found.dtype == dtype


def test_what_it_takes(ids):
    model, without = in_8_bits(), sparsify(make_zeroed())
    weight = make_zeroed().lm_head.weight
    saved = 2 * (weight.nbytes - Int8Weight.nearest(weight).nbytes)
    assert without.get_memory_footprint() - model.get_memory_footprint() == saved
    rounded = in_8_bits(activations="int8")
    assert_close(logits(rounded, ids[:1, :4]), logits(model, ids[:1, :4]), 5e-2)
    assert "value_bits=8, activations=bf16" in repr(model.lm_head)


def test_moved_converted_copied_and_compiled(ids):
    """Sharing survives, and scales and levels are not converted."""
    model = in_8_bits("gpt2")
    expected = logits(model, ids)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again, ids), expected)
        assert again.lm_head.embedding is again.transformer.wte is not model.transformer.wte
    half = copy.deepcopy(model).half()
    assert logits(half, ids).dtype == torch.float16
    assert_close(logits(half, ids).float(), expected, 3e-2)
    assert torch.equal(half.float().transformer.wte.dense(), model.transformer.wte.dense())
    for module, x in ((model.lm_head, torch.randn(2, 32)), (model.transformer.wte, ids)):
        with torch.no_grad():
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), module(x))
    other = in_8_bits("gpt2", sparsity=0.6)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), expected)
    state = clone(model.transformer.wte)
    state["scales"].fill_(0x7F80)
    with pytest.raises(RuntimeError, match="is damaged: its scales are not all finite"):
        model.transformer.wte.load_state_dict(state)


def test_what_is_refused(ids):
    with pytest.raises(ValueError, match="embedding_bits is 4: expected 8"):
        sparsify(make_zeroed(), embedding_bits=4)
    with pytest.raises(ValueError, match="activations='int4'"):
        sparsify(make_zeroed(), embedding_bits=8, activations="int4")
    with pytest.raises(ValueError, match="packed already: call optimum_neuronal.densify"):
        sparsify(sparsify(make_zeroed()), embedding_bits=8)
    model = in_8_bits()
    with pytest.raises(ValueError, match="densify"):
        NeuronALPruner(NeuronALConfig(0.5, saliency="magnitude", topup="uniform")).prune(model)
    with pytest.raises(TypeError, match="PackedEmbedding', for inference only: call optimum_neuronal.densify"):
        model.resize_token_embeddings(100)
    for bad in (-1, 64):
        with pytest.raises((IndexError, RuntimeError)):
            logits(model, torch.tensor([[bad]]))
    before = clone(model)
    model.train()
    for call in (lambda: model(input_ids=ids, labels=ids).loss.backward(), lambda: model.get_input_embeddings()(ids)):
        with pytest.raises(RuntimeError, match="call optimum_neuronal.densify"):
            call()
    with torch.no_grad():
        model(input_ids=ids)
    assert_same_state(model, before)


def test_a_dense_model_with_8_bits_alone(ids):
    """It need not be sparse: the head is smaller all the same, and training it is refused by the head."""
    model = sparsify(make_model("llama"), embedding_bits=8, activations="bf16")
    assert model.packing.packed == 2
    with pytest.raises(RuntimeError, match="call optimum_neuronal.densify"):
        model.train().lm_head(torch.randn(1, 32, requires_grad=True))


@pytest.mark.parametrize(
    "spoil, why",
    [
        (lambda m: m.lm_head.weight.data.__setitem__((0, 0), torch.inf), "holds NaN or infinite"),
        (lambda m: setattr(m.lm_head, "forward", m.lm_head.forward), "its forward was replaced"),
        (lambda m: m.register_module("probe", torch.nn.Linear(1, 1)) or setattr(m.probe, "weight", m.lm_head.weight),
         "shares its weight with another module"),
    ],
)  # fmt: skip
def test_what_stays_dense_is_told(spoil, why):
    model = make_zeroed()
    spoil(model)
    sparsify(model, embedding_bits=8)
    assert why in model.packing.left_dense["lm_head"] and type(model.lm_head) is torch.nn.Linear
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


@pytest.mark.parametrize(
    "family, value_bits",
    by_day([("llama", 4), ("gpt2", None), ("gemma3_text", None), ("mixtral", None)], ("llama", 4), ("gpt2", None)),
)
def test_saved_loaded_and_saved_again(family, value_bits, tmp_path, ids):
    """Never dense in memory; the files are the same, whoever writes them."""
    model = make_model(family).bfloat16()
    fields = {"embedding_bits": 8, "value_bits": value_bits}
    pruner = NeuronALPruner(NeuronALConfig(0.6, saliency="magnitude", topup="uniform", **fields))
    pruner.save(pruner.prune(model), tmp_path / "model", "packed")
    loaded = SparseModelForCausalLM.from_pretrained(tmp_path / "model", activations="bf16")
    assert isinstance(loaded.get_input_embeddings(), PackedEmbedding)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_close(logits(loaded, ids).float(), logits(dense, ids).float(), 2e-2)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == (tmp_path / "model" / FILE).read_bytes()
    save_pretrained(loaded, tmp_path / "dense", format="dense")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), clone(dense))
    assert_same_state(densify(loaded), clone(dense))


def test_a_model_in_memory_is_saved_with_8_bits(tmp_path):
    """As its sparsity_config tells from then on; in another dtype, values are what they were."""
    model = sparsify(make_sparse("gpt2"), embedding_bits=8)
    about = model.config.sparsity_config
    assert about["embedding_bits"] == 8 and about["head_weights"] == ["transformer.wte.weight"]
    dense = clone(densify(copy.deepcopy(model)))
    model.save_pretrained(tmp_path / "model")
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), dense)
    assert b"wte.weight.packed_codes" in (tmp_path / "model" / FILE).read_bytes()
    model.half().save_pretrained(tmp_path / "half")
    expected = {name: value.half() for name, value in dense.items()}
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto"), expected)


def test_loaded_where_a_tied_head_has_another_form(tmp_path, ids, monkeypatch):
    """The weight that was read is unpacked for both, which stay tied."""
    model = sparsify(make_sparse("gpt2"), embedding_bits=8, activations="bf16")
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("optimum_neuronal.inference.head_packing.is_head", lambda module: False)
    loaded = SparseModelForCausalLM.from_pretrained(tmp_path, activations="bf16")
    assert type(loaded.lm_head) is torch.nn.Linear and loaded.lm_head.weight is loaded.transformer.wte.weight
    assert_close(logits(loaded, ids), expected)
