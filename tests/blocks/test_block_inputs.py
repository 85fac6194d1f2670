import pytest
import torch

from optimum_neuronal.blocks.block_inputs import block_outputs, first_output, inference, to_device
from optimum_neuronal.blocks.runner import BlockRunner, replay
from optimum_neuronal.model.find_blocks import find_decoder


def test_replay_is_bit_equal_to_the_models_forward_and_leaves_nothing_behind(any_model, ids):
    before = {name: set(module.__dict__) for name, module in any_model.named_modules()}
    for batch_size in [1, 5]:
        with inference(any_model):
            decoder = find_decoder(any_model)
            inputs = BlockRunner(decoder, batch_size).capture(ids)
            assert [len(hidden) for hidden in inputs.hidden] == [len(part) for part in ids.split(batch_size)]
            expected = [block_outputs(decoder, decoder.blocks, batch) for batch in ids.split(batch_size)]
            hidden = inputs.hidden
            for index, (block, calls) in enumerate(zip(decoder.blocks, inputs.calls)):
                hidden, _ = replay(block, hidden, calls, record=None)
                assert all(torch.equal(ours, first_output(batch[index])) for ours, batch in zip(hidden, expected))
            last = decoder.module(ids[:batch_size], use_cache=False).last_hidden_state
            assert torch.equal(inputs.final_norm(hidden[0]), last), "the final norm is found"
    for name, inner in any_model.named_modules():
        assert not inner._forward_pre_hooks and not inner._forward_hooks and set(vars(inner)) == before[name]


def test_a_failure_restores_the_blocks(llama, ids):
    decoder = find_decoder(llama)
    with pytest.raises(IndexError), inference(llama):
        BlockRunner(decoder, 4).capture(ids + 1000)
    assert all("forward" not in block.module.__dict__ for block in decoder.blocks)


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
