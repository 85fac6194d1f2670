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
    written, found = (
        load_file(tmp_path / "model.safetensors"),
        hf_private.as_stored(model, hf_private.untied(model, model.state_dict())),
    )
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], value) for name, value in written.items())
