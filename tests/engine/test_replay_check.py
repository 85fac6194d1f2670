import pytest
import torch
from conftest import make_model

from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.offload import BlockLoader
from optimum_neuronal.engine.replay_check import check_replay
from optimum_neuronal.model.find_blocks import find_decoder


def check(model, ids):
    decoder = find_decoder(model)
    return check_replay(decoder, ids[:1], "cpu", BlockLoader(decoder.blocks))


def test_it_tells_how_blocks_return_hidden_states(any_model, ids):
    with inference(any_model):
        wrap = check(any_model, ids)
        hidden = torch.zeros(1, 2, 32)
        wrapped = wrap(hidden)
        assert (wrapped[0] if isinstance(wrapped, tuple) else wrapped) is hidden
    assert not any(module._forward_hooks or "forward" in module.__dict__ for module in any_model.modules())


def test_check_replay_refuses_what_it_does_not_understand(llama, ids):
    original = type(llama.model.layers[1]).forward
    calls = []

    def stateful(self, hidden_states, **kwargs):
        calls.append(1)
        return original(self, hidden_states, **kwargs) + 0.1 * len(calls)

    layer = llama.model.layers[1]
    layer.__class__ = type("LlamaDecoderLayer", (type(layer),), {"forward": stateful})
    message = r"blocks \(LlamaDecoderLayer\) does not give what the model computes: the largest difference is 0\.\d+.*"
    message += r"register_architecture\(model_type, Architecture\(blocks='layers'\)\), model_type being 'llama'"
    with pytest.raises(ValueError, match=message), inference(llama):
        check(llama, ids)


def test_a_projection_that_never_runs_is_named(llama, ids):
    llama.model.layers[1].mlp.fc1 = torch.nn.Linear(32, 48)
    message = r"layers\.1\.mlp\.fc1 takes no part in the model's forward"
    with pytest.raises(ValueError, match=message), inference(llama):
        check(llama, ids)


def test_activations_that_are_not_finite_are_refused_with_their_dtype(ids):
    model = make_model("llama")
    model.model.embed_tokens.weight.data[:] = float("nan")
    message = (
        r"NaN or infinity on the first calibration sequence: load it in bfloat16 or float32 \(it is torch.float32\)"
    )
    with pytest.raises(ValueError, match=message), inference(model):
        check(model, ids)


def test_weights_are_left_as_they_are(llama, ids):
    before = {name: weight.clone() for name, weight in llama.state_dict().items()}
    with inference(llama):
        check(llama, ids)
    assert all(torch.equal(weight, before[name]) for name, weight in llama.state_dict().items())
