import copy
import gc
import logging
import weakref

import peft
import pytest
import torch
from conftest import FEW, make_model
from packed_models import assert_close, assert_same_state, logits, make_zeroed, zero
from torch import nn
from torch.nn.utils import prune
from transformers import Trainer, TrainingArguments

from optimum_neuronal import densify, lora_for_packed, sparsify
from optimum_neuronal.packed import sparsify as module
from optimum_neuronal.packed.packed_experts import PackedStack
from optimum_neuronal.packed.packed_module import PackedLinear, dense_state, packed_modules


MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe", "nemotron_h", "afmoe", "jamba")
OTHERS = ("falcon", "phi3", "bamba", "minimax", "gemma3", "mpt")


@pytest.mark.parametrize("family", [*dict.fromkeys((*FEW, *OTHERS, *MIXTURES))])
def test_the_same_model_and_back(family, ids):
    model = make_zeroed(family)
    expected, kind, function = logits(model, ids), type(model), model.config._experts_implementation
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert sparsify(model) is model and type(model) is kind
    if family in MIXTURES:
        assert any(isinstance(module, PackedStack) for module in model.modules())
        assert not any(p.ndim == 3 for name, p in model.named_parameters() if "experts" in name)
    assert_close(logits(model, ids), expected)
    assert model.packing.packed and model.packing.packed_bytes < 0.6 * model.packing.dense_bytes
    assert all(torch.equal(value, state[name]) for name, value in dense_state(model).items())
    assert densify(model) is model and not list(packed_modules(model))
    assert_same_state(model, state)
    assert torch.equal(logits(model, ids), expected) and model.config._experts_implementation == function
    assert vars(model).keys() == vars(make_model(family)).keys()
    densify(torch.compile(sparsify(model)))
    assert not hasattr(model, "packing")


def test_what_is_left_dense_is_named(caplog, ids):
    model = make_zeroed()
    layer = model.model.layers[1]
    up, down = layer.mlp.up_proj, layer.mlp.down_proj
    up.weight.data.normal_().view(-1)[::40] = 0
    layer.self_attn.k_proj.weight = layer.self_attn.q_proj.weight  # tied
    for pruned in (first := model.model.layers[0].mlp).up_proj, first.down_proj:
        prune.l1_unstructured(pruned, "weight", 0.8)
    prune.remove(first.down_proj, "weight")
    down.forward = lambda x: 2 * torch.nn.functional.linear(x, down.weight)
    expected = logits(model, ids)
    with caplog.at_level(logging.INFO, "transformers.optimum_neuronal.packed.sparsify"):
        sparsify(model)
    assert "torch.nn.utils.prune.remove" in model.packing.left_dense.pop("model.layers.0.mlp.up_proj")
    assert model.packing.left_dense == {
        "model.layers.1.mlp.up_proj": "not smaller packed",
        "model.layers.1.mlp.down_proj": "its forward was replaced",
        "model.layers.1.self_attn.q_proj": "shares its weight with another module, or the config says so",
        "model.layers.1.self_attn.k_proj": "shares its weight with another module, or the config says so",
    }
    assert type(up) is nn.Linear and "up_proj (not smaller packed)" in repr(model.packing)
    assert_close(logits(model, ids), expected)
    assert any("16 weights packed" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("tied", [False, True])
def test_a_sparse_head_is_packed_unless_it_is_tied(tied):
    model = zero(make_model("llama", tie_word_embeddings=tied))
    head = model.lm_head.weight
    head.data[torch.rand_like(head) < 0.8] = 0
    sparsify(model)
    assert isinstance(model.lm_head, PackedLinear) == (not tied)
    why = "shares its weight with another module, or the config says so"
    assert tied == (model.packing.left_dense.get("lm_head") == why)


def test_dense_weights_are_freed_one_after_the_other(monkeypatch):
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


def test_errors():
    model = make_zeroed()
    with pytest.raises(TypeError, match="Expected a transformers PreTrainedModel, got Linear"):
        sparsify(nn.Linear(2, 2))
    with torch.device("meta"), pytest.raises(ValueError, match="offloaded or on the meta device"):
        sparsify(type(model)(model.config))
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge them first"):
        sparsify(adapted)
    for dense in (make_model("llama"), copy.deepcopy(model).double()):
        with pytest.raises(ValueError, match="No weight of LlamaForCausalLM is sparse enough"):
            sparsify(dense)
        assert not hasattr(dense, "hf_quantizer")
    masked = make_model("llama")
    prune.l1_unstructured(masked.model.layers[0].mlp.up_proj, "weight", 0.8)
    with pytest.raises(ValueError, match="up_proj.weight_orig', which is not read: torch.nn.utils.prune made it"):
        sparsify(masked)
    model.is_quantized = True
    with pytest.raises(ValueError, match="only floating-point weights can be packed"):
        sparsify(model)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_training_raises(family, ids, tmp_path):
    model = sparsify(make_zeroed(family))
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model(input_ids=ids).logits.sum().backward()
    with pytest.raises(RuntimeError, match="packed and cannot be trained"):
        model(input_ids=ids, labels=ids).loss.backward()
    data = [{"input_ids": ids[0], "labels": ids[0]}]
    with pytest.raises(RuntimeError, match=r"densify\(model\) first"):
        Trainer(model, TrainingArguments(tmp_path, report_to=[]), train_dataset=data).train()
    with pytest.raises(ValueError, match=r"PackedLinear.*densify\(model\) first; for LoRA .*lora_for_packed\) is not"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    densify(model).train()(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_beside_adapters_dense_weights_are_frozen():
    """As PEFT leaves a dense model's."""
    model = sparsify(make_zeroed())
    adapted = peft.get_peft_model(model, lora_for_packed(model, peft.LoraConfig(target_modules="all-linear")))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    densify(adapted)
    assert {name for name, parameter in adapted.named_parameters() if parameter.requires_grad} == trained


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_frozen_weights_are_frozen_again(family):
    model = make_zeroed(family)
    names = [name for name, _ in model.named_parameters()]
    for name in names[::2]:
        model.get_parameter(name).requires_grad_(False)
    densify(sparsify(model))
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    weights = [name for name in names if not name.endswith("bias")]
    assert {name: trained[name] for name in weights} == {name: names.index(name) % 2 == 1 for name in weights}
