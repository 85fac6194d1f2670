import sys

import pytest
import torch

from optimum_neuronal.blocks.block_inputs import block_outputs, capture_inputs, to_device
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.blocks.statistics import observe_inputs
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


def is_leaving(frame) -> bool:
    return frame is not None and (frame.f_code.co_name == "__exit__" or is_leaving(frame.f_back))


@pytest.mark.parametrize("what", ["capture", "outputs", "statistics", "modes"])
def test_ctrl_c_at_any_line_before_the_end_leaves_no_forward_no_hook_and_no_other_mode(what, llama, ids):
    """A trace function raises it."""
    decoder = find_decoder(llama)
    runner = BlockRunner(decoder)
    wrap, modules = runner.wrap, {name: p.module for name, p in decoder.blocks[0].projections.items()}

    def record():
        with observe_inputs(modules, {}, (2, 16)):
            decoder.module(input_ids=ids[:2, :16], use_cache=False)

    def evaluate():
        with inference(llama):
            pass

    work = {
        "modes": evaluate,
        "capture": lambda: capture_inputs(decoder, ids[:2, :16], 1, runner.device, wrap),
        "outputs": lambda: block_outputs(decoder, decoder.blocks[:2], ids[:1, :16]),
        "statistics": record,
    }[what]
    files = ("torch_state.py", "block_inputs.py", "statistics.py", "contextlib.py")

    def stopped_at(line: int) -> bool:
        def trace(frame, event, _argument):
            nonlocal line
            if not frame.f_code.co_filename.endswith(files) and frame.f_code.co_name != "register_forward_pre_hook":
                return None
            line -= event == "line" and not is_leaving(frame)
            if line == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        llama.train(what == "modes")
        sys.settrace(trace)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    line = 1
    with inference(llama):
        while stopped_at(line):
            left = [name for name, m in llama.named_modules() if "forward" in vars(m) or m._forward_hooks]
            left += [name for name, m in llama.named_modules() if m._forward_pre_hooks]
            left += [name for name, m in llama.named_modules() if m.training != (what == "modes")]
            assert not left, (line, left)
            line += 1 + line // 50
    assert line > 40
