import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from optimum_neuronal import NeuronALConfig

from .conftest import config


def test_the_config_is_a_quantization_config_to_transformers(dense):
    cfg = config(dense)
    assert NeuronALConfig.from_dict(copy.deepcopy(cfg).to_dict()) == cfg
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=cfg.to_dict())
    expected = AutoModelForCausalLM.from_pretrained(dense, quantization_config=cfg)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected.model.layers[0].mlp.up_proj.weight)
    with pytest.raises(ValueError, match="no field 'saliencys'"):
        AutoModelForCausalLM.from_pretrained(dense, quantization_config={**cfg.to_dict(), "saliencys": "wanda"})
