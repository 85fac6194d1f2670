import pytest
import torch

from optimum_neuronal.blocks.block_inputs import to_device
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder


def test_inference_puts_the_modes_back(llama, ids):
    llama.train()
    llama.model.layers[1].eval()
    with pytest.raises(RuntimeError), inference(llama):
        assert not any(module.training for module in llama.modules()) and not torch.is_grad_enabled()
        raise RuntimeError
    assert llama.training and llama.model.layers[0].training and not llama.model.layers[1].training
    with torch.inference_mode(), inference(llama):
        BlockRunner(find_decoder(llama), 1).capture(ids[:1])
        assert not torch.is_inference_mode_enabled(), "weights stay ordinary"


def test_shared_contents_move_with_hidden_states():
    hidden = torch.zeros(1, 2, 3)
    hidden.shared_contents = {1: {"keys": torch.ones(2)}}
    assert to_device(hidden, torch.device("meta")).shared_contents is hidden.shared_contents
