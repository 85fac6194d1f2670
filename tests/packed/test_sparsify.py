import copy
import gc
import logging
import pickle
import re
import weakref

import peft
import pytest
import torch
from conftest import FEW, make_model
from families import FAMILIES
from packed_models import assert_close, assert_same_state, logits, make_zeroed, zero
from sparse import make_sparse
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from optimum_neuronal import NeuronALConfig, NeuronALPruner, densify, keep_lora_sparse, keep_sparsity, sparsify
from optimum_neuronal.checkpoint.save_pretrained import save_packed_by_default, saves_packed_by_default
from optimum_neuronal.model.packed_modules import packed_modules
from optimum_neuronal.packed.packed_linear import PackedLinear


def cloned(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("family", [*FEW, "falcon", "phi3", "bamba", "minimax", "gemma3", "mpt"])
def test_the_same_model_and_back(family, ids):
    model = make_zeroed(family)
    state, expected, kind = cloned(model), logits(model, ids), type(model)
    assert sparsify(model) is model and type(model) is kind
    assert_close(logits(model, ids), expected)
    assert model.packing.packed and model.packing.packed_bytes < 0.6 * model.packing.dense_bytes
    assert densify(model) is model and not list(packed_modules(model))
    assert_same_state(model, state)
    assert torch.equal(logits(model, ids), expected)
    assert vars(model).keys() == vars(make_model(family)).keys()


def test_other_dtypes(ids):
    for dtype in [torch.bfloat16, torch.float16]:
        model = make_zeroed().to(dtype)
        expected = logits(model, ids).float()
        assert_close(logits(sparsify(model), ids).float(), expected, 2e-2)


def test_all_projections_that_are_pruned_are_packed():
    model = make_sparse("llama")
    expected = {name for name, module in model.named_modules() if "_proj" in name}
    sparsify(model)
    assert {name for name, _ in packed_modules(model)} == expected and not model.packing.left_dense
    assert model.packing.packed == len(FAMILIES["llama"].expected(0)) * 3


def test_what_is_left_dense_is_named(caplog, ids):
    model = make_zeroed()
    layer = model.model.layers[1]
    layer.mlp.up_proj.weight.data.normal_()
    layer.self_attn.k_proj.weight = layer.self_attn.q_proj.weight  # tied
    down = layer.mlp.down_proj
    down.forward = lambda x: 2 * torch.nn.functional.linear(x, down.weight)
    expected = logits(model, ids)
    with caplog.at_level(logging.INFO, "transformers.optimum_neuronal.inference.summary"):
        sparsify(model)
    assert model.packing.left_dense == {
        "model.layers.1.mlp.up_proj": "not smaller packed",
        "model.layers.1.mlp.down_proj": "its forward was replaced",
        "model.layers.1.self_attn.q_proj": "shares its weight with another module",
        "model.layers.1.self_attn.k_proj": "shares its weight with another module",
    }
    assert type(layer.mlp.up_proj) is nn.Linear and "up_proj (not smaller packed)" in str(model.packing)
    page = re.sub(r" +<", "<", model.packing._repr_html_())
    assert "<tr><td>packed weights</td><td>17</td></tr>" in page
    assert "<tr><td>left dense: model.layers.1.mlp.up_proj</td><td>not smaller packed</td></tr>" in page
    assert_close(logits(model, ids), expected)
    assert any("17 weights packed" in record.getMessage() for record in caplog.records)


def test_layers_that_no_table_knows():
    """Of a model pruned by another tool: whatever is linear and sparse, the head too, but for a tied one."""
    for tied in (False, True):
        model = zero(make_model("llama", tie_word_embeddings=tied))
        head = model.lm_head.weight
        head.data[torch.rand_like(head) < 0.8] = 0
        sparsify(model)
        assert isinstance(model.lm_head, PackedLinear) == (not tied)
        assert tied == (model.packing.left_dense.get("lm_head") == "shares its weight with another module")


def test_dense_weights_are_freed_one_after_the_other(monkeypatch):
    from optimum_neuronal.packed import sparsify as module

    model = make_zeroed()
    weights = {name: weakref.ref(m.weight) for name, m in model.named_modules() if type(m) is nn.Linear}
    alive, put = [], module.put_packed

    def counting(*arguments):
        put(*arguments)
        alive.append(sum(weight() is not None for weight in weights.values()))

    monkeypatch.setattr(module, "put_packed", counting)
    gc.disable()
    try:
        sparsify(model)
    finally:
        gc.enable()
    assert alive[-1] <= 2 and all(later <= earlier for earlier, later in zip(alive, alive[1:]))
    assert len(alive) == 21 and alive[5] <= len(weights) - 5


def test_twice_and_what_is_dense_already(ids):
    model = sparsify(make_zeroed())
    expected, packing = logits(model, ids), model.packing
    assert torch.equal(logits(sparsify(model), ids), expected) and model.packing == packing
    dense = make_model("llama")
    save_packed_by_default(dense)
    assert densify(dense) is dense and saves_packed_by_default(dense), "as AutoModel loads a packed checkpoint"
    with pytest.raises(ValueError, match="its weights are dense. Prune it first"):
        sparsify(dense)


def test_models_that_are_refused():
    model = make_zeroed()
    with pytest.raises(TypeError, match="Expected a transformers PreTrainedModel, got Linear"):
        sparsify(nn.Linear(2, 2))
    with torch.device("meta"), pytest.raises(ValueError, match="offloaded .device_map., or on the meta device"):
        sparsify(type(model)(model.config))
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"]))
    for carrying in (adapted, adapted.base_model.model):
        with pytest.raises(ValueError, match="merge them first"):
            sparsify(carrying)
    with pytest.raises(ValueError, match="is smaller packed"):
        sparsify(copy.deepcopy(model).double())
    model.is_quantized = True
    with pytest.raises(ValueError, match="only floating-point weights can be packed"):
        sparsify(model)


def test_training_pruning_and_adapters_are_refused(ids, tmp_path):
    model = sparsify(make_sparse("llama"))
    with pytest.raises(RuntimeError, match=r"to train it, call optimum_neuronal.densify\(model\) first"):
        model.train()(input_ids=ids, labels=ids)
    with pytest.raises(RuntimeError, match="compute no gradients"):
        model.eval()(input_ids=ids, labels=ids).loss.backward()
    trainer = Trainer(
        model, TrainingArguments(tmp_path, report_to=[]), train_dataset=[{"input_ids": ids[0], "labels": ids[0]}]
    )
    with pytest.raises(RuntimeError, match=r"densify\(model\) first"):
        trainer.train()
    with pytest.raises(ValueError, match=r"21 packed weights.*densify\(model\) first to train it"):
        keep_sparsity(model)
    with pytest.raises(
        ValueError, match=r"PackedLinear.*densify\(model\) first; for LoRA .*lora_for_packed\) is not supported"
    ):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="carries no adapters"):
        keep_lora_sparse(model)
    del model.config.sparsity_config
    with pytest.raises(ValueError, match=r"densify\(model\) first to prune it"):
        NeuronALPruner(NeuronALConfig(0.8, saliency="magnitude", topup="uniform")).prune(model)
    densify(model).train()(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_copies_pickles_and_conversions(ids, tmp_path):
    model = sparsify(make_sparse("mixtral"))
    expected = logits(model, ids)
    torch.save(model, tmp_path / "model.pt")
    others = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    )
    for number, other in enumerate(others):
        assert torch.equal(logits(other, ids), expected)
        other.save_pretrained(tmp_path / str(number))
        assert (tmp_path / str(number) / "packed.safetensors.index.json").exists()
        assert other.save_pretrained.model is other
    half = copy.deepcopy(model).bfloat16()  # its experts may be others
    assert half.dtype == torch.bfloat16 and half.get_memory_footprint() < 0.7 * model.get_memory_footprint()
    assert torch.equal(logits(half, ids), logits(densify(half), ids))


def test_state_dict_of_another_model(ids):
    model, other = sparsify(make_zeroed(seed=1)), sparsify(make_zeroed(sparsity=0.5))
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), logits(model, ids))


def test_inner_models_save_packed_too(tmp_path):
    model = sparsify(make_zeroed())
    model.model.save_pretrained(tmp_path)
    assert (tmp_path / "packed.safetensors.index.json").exists() and not (tmp_path / "model.safetensors").exists()
    densify(model)
    assert not any(
        "save_pretrained" in vars(module) for module in model.modules() if isinstance(module, PreTrainedModel)
    )
