from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import make_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from transformers.utils.quantization_config import QuantizationConfigMixin

from optimum_neuronal.compat import hf_private


def test_an_early_quantizer_sees_the_config_in_every_release():
    class Quantizer(hf_private.EarlyQuantizer):
        is_serializable = is_trainable = False

        def see_config(self, config):
            config.seen = True

    for hook in ("update_tp_plan", "update_attn_implementation"):
        assert getattr(Quantizer(QuantizationConfigMixin("none")), hook)(SimpleNamespace()).seen


def test_forget_quantization():
    model = make_model("llama")
    plain = vars(model).keys(), vars(model.config).keys()
    model.config.quantization_config, model.hf_quantizer = QuantizationConfigMixin("none"), object()
    assert hf_private.is_quantized(model)
    hf_private.look_for_weights(model.config, "other.safetensors.index.json")
    hf_private.forget_quantization(model)
    hf_private.forget_quantization(model)
    assert (vars(model).keys(), vars(model.config).keys()) == plain and not hf_private.is_quantized(model)
    model.is_quantized = True
    assert hf_private.is_quantized(model)


def test_look_for_weights(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    hf_private.look_for_weights(config, "other.safetensors.index.json")
    with pytest.raises((OSError, ValueError), match=r"other\.safetensors"):
        LlamaForCausalLM.from_pretrained(tmp_path, config=config)


@pytest.mark.parametrize("family, overrides", [("mixtral", {}), ("llama", {"tie_word_embeddings": True})])
def test_stored_tensors_are_what_save_pretrained_writes(family, overrides, tmp_path):
    model = make_model(family, **overrides)
    model.save_pretrained(tmp_path)
    written, found = load_file(tmp_path / "model.safetensors"), hf_private.stored_tensors(model)
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], value) for name, value in written.items())


def test_what_computes_a_mixture():
    model, hidden = make_model("mixtral"), torch.randn(5, 32)
    experts = model.model.layers[0].mlp.experts
    indices, weights = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 3]]), torch.full((5, 2), 0.5)
    assert hf_private.chooses_experts_function(experts)
    assert not hf_private.chooses_experts_function(model.model.layers[0].self_attn.q_proj)
    with torch.no_grad():
        expected = experts(hidden, indices, weights)
        assert torch.allclose(hf_private.own_experts_forward(experts)(hidden, indices, weights), expected, atol=1e-5)
    hf_private.register_experts_function("of this test", lambda module, *arguments: (module, *arguments))
    before = hf_private.set_experts_function(experts, "of this test")
    other = model.model.layers[1].mlp.experts
    assert other(hidden, indices, weights) == (other, hidden, indices, weights)
    assert hf_private.set_experts_function(experts, before) == "of this test"
    with torch.no_grad():
        assert torch.equal(experts(hidden, indices, weights), expected)


def test_known_as_offloaded():
    model = make_model("llama")
    assert not hasattr(model, "hf_device_map")
    with pytest.raises(ZeroDivisionError), hf_private.known_as_offloaded(model):
        assert "disk" in model.hf_device_map.values()
        raise ZeroDivisionError
    assert not hasattr(model, "hf_device_map")
    model.hf_device_map = {"": "cpu"}
    with hf_private.known_as_offloaded(model):
        assert model.hf_device_map != {"": "cpu"}
    assert model.hf_device_map == {"": "cpu"}


def test_experts():
    inner = torch.tensor([[-1.0, 2.0, 3.0, 4.0]])
    plain = SimpleNamespace(act_fn=torch.relu)
    assert hf_private.activate(plain, inner, gated=False).tolist() == [[0, 2, 3, 4]]
    assert hf_private.activate(plain, inner, gated=True).tolist() == [[0, 8]]
    own = SimpleNamespace(_apply_gate=lambda inner: inner[:, ::2], post_expert_norm=torch.neg, is_concatenated=False,
                          is_transposed=True, down_proj_bias=inner)  # fmt: skip
    assert hf_private.activate(own, inner, gated=True).tolist() == [[-1, 3]]
    assert hf_private.finish(plain, inner) is inner and torch.equal(hf_private.finish(own, inner), -inner)
    assert hf_private.gates_in_turns(own) and not hf_private.gates_in_turns(plain)
    assert hf_private.is_transposed(own, default=False) and not hf_private.is_transposed(plain, default=False)
    assert hf_private.is_transposed(plain, default=True)
    assert hf_private.expert_bias(plain, "down_proj", 0) is None
    assert torch.equal(hf_private.expert_bias(own, "down_proj", 0), inner[0])
