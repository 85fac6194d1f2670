"""Models whose packed weights have values of few bits: computing, refusals, saving and loading."""

import copy
import pickle
from functools import cache

import pytest
import torch
from conftest import FEW
from packed import assert_close, assert_same_state, logits, make_zeroed
from profiles import by_day
from sparse import make_sparse

from optimum_neuronal import SparseModelForCausalLM, densify, keep_sparsity, sparsify
from optimum_neuronal.formats.codebooks import BITS
from optimum_neuronal.inference.coded_rows import CodedRows
from optimum_neuronal.inference.packed_linear import PackedLinear
from optimum_neuronal.model.packed_modules import packed_modules


@cache
def _coded(value_bits, activations, sparsity):
    return sparsify(small(sparsity), value_bits=value_bits, activations=activations)


def coded(value_bits=4, activations="bf16", sparsity=0.7):
    """A llama of one block, packed once and copied."""
    return copy.deepcopy(_coded(value_bits, activations, sparsity))


def small(sparsity=0.7):
    return make_zeroed("llama", sparsity, num_hidden_layers=1)


def clone(model) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


def first(model) -> PackedLinear:
    return next(module for module in model.modules() if isinstance(module, PackedLinear))


@pytest.mark.parametrize("family", by_day([*FEW, "gpt_oss", "nemotron_h", "phi3"], "llama", "gpt2", "gpt_oss"))
def test_as_the_dense_model_of_the_same_values(family, ids):
    model = sparsify(make_zeroed(family), value_bits=4, activations="bf16")
    modules = [module for _, module in packed_modules(model)]
    assert modules and all(isinstance(module.rows, CodedRows) for module in modules)
    found = logits(model, ids)
    assert_close(found, logits(densify(model), ids))
    state = clone(model)
    assert_same_state(densify(sparsify(model, value_bits=4)), state), "values that have codes keep them"
    assert not list(packed_modules(model))


def test_bits(ids):
    for value_bits in BITS:
        model, other = coded(value_bits=value_bits), small()
        before = logits(other, ids)
        errors = [(logits(model, ids) - before).norm() / before.norm()]
        assert errors[0] < {8: 0.02, 4: 0.2, 3: 0.4, 2: 1.0}[value_bits]
        rounded = coded(value_bits=value_bits, activations="int8")
        assert_close(logits(rounded, ids[:1, :4]), logits(model, ids[:1, :4]), 5e-2)
        assert model.packing.packed_bytes < 0.5 * sparsify(other).packing.packed_bytes
        assert f"value_bits={value_bits}, activations=bf16" in repr(first(model))


def test_other_dtypes(ids):
    """Scales and levels are not converted, nor lost: back in float32 the weights are what they were."""
    for dtype in [torch.bfloat16, torch.float16]:
        model = coded()
        expected, dense = logits(model, ids), first(model).dense()
        assert logits(model.to(dtype), ids).dtype == dtype
        assert_close(logits(model, ids).float(), expected, 3e-2)
        assert first(model).weight.dtype == dtype and first(model).scales.dtype == torch.uint8
        assert torch.equal(first(model.float()).dense(), dense)


def test_state_copies_and_compilation(ids):
    model, other = coded(), coded(sparsity=0.6)
    other.load_state_dict(model.state_dict())
    for again in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again, ids), logits(model, ids))
    state = {name: value.clone() for name, value in first(model).state_dict().items()}
    state["codes"] = state["codes"][:-1]
    with pytest.raises(RuntimeError, match="codes is damaged: its offsets go from 0"):
        first(model).load_state_dict(state)
    linear, x = first(model), torch.randn(2, first(model).in_features)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), linear(x))


def test_what_is_refused():
    model = small()
    state = clone(model)
    for arguments, message in (
        ({"value_bits": 5}, "values of 5 bits are not known: expected one of 8, 4, 3, 2"),
        ({"value_bits": 4, "activations": "int4"}, "activations='int4': expected one of 'int8', 'bf16'"),
    ):
        with pytest.raises(ValueError, match=message):
            sparsify(model, **arguments)
    assert_same_state(model, state)
    with pytest.raises(ValueError, match="packed already: call optimum_neuronal.densify"):
        sparsify(sparsify(model), value_bits=4)
    model = coded()
    with pytest.raises(ValueError, match="packed"):
        keep_sparsity(model)
    with pytest.raises(RuntimeError, match="densify"):
        model.train()(
            input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)
        ).loss.backward()


def test_values_that_are_not_finite_are_left_dense():
    model = small()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.inf
    sparsify(model, value_bits=4)
    assert model.packing.left_dense == {
        "model.layers.0.mlp.up_proj": "holds NaN or infinite values, which have no codes"
    }


@pytest.mark.parametrize("family", by_day(["llama", "mixtral", "gpt2"], "mixtral", "gpt2"))
def test_saved_and_loaded_with_codes(family, tmp_path, ids):
    """The files hold the very codes, of which the loaded model is made."""
    model = make_sparse(family)
    model = sparsify(model, value_bits=4, activations="bf16")
    assert model.config.sparsity_config["value_bits"] == 4
    expected, dense = logits(model, ids), clone(densify(copy.deepcopy(model)))
    model.save_pretrained(tmp_path)
    loaded = SparseModelForCausalLM.from_pretrained(tmp_path, activations="bf16")
    kinds = {type(module.rows) for _, module in packed_modules(loaded)}
    assert kinds == {CodedRows} and loaded.packing.packed == model.packing.packed
    assert_close(logits(loaded, ids), expected)
    assert_same_state(densify(loaded), dense)
    assert first(SparseModelForCausalLM.from_pretrained(tmp_path)).rows.activations == "int8"
    with pytest.raises(ValueError, match="activations='fp8'"):
        SparseModelForCausalLM.from_pretrained(tmp_path, activations="fp8")


def test_saved_where_nothing_tells_how_it_was_pruned(tmp_path, ids):
    """The same values, as a packed model's are saved."""
    model = coded()
    model.save_pretrained(tmp_path)
    assert_same_state(densify(SparseModelForCausalLM.from_pretrained(tmp_path)), clone(densify(model)))
