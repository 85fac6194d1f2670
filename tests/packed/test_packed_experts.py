import pytest
import torch
from conftest import make_model
from packed_models import assert_close, logits, make_zeroed

from optimum_neuronal import densify, sparsify
from optimum_neuronal.packed.packed_experts import FUNCTION
from optimum_neuronal.packed.packed_weight import PackedWeight


def test_only_the_chosen_experts_are_read(monkeypatch):
    model = sparsify(make_zeroed("mixtral"))
    seen = []
    window = PackedWeight.window
    monkeypatch.setattr(
        PackedWeight, "window", lambda rows, first, last: (seen.append(last - first), window(rows, first, last))[1]
    )
    logits(model, torch.tensor([[5]]))
    config = model.config
    per_expert = 2 * config.intermediate_size + config.hidden_size
    assert sum(seen) == config.num_hidden_layers * config.num_experts_per_tok * per_expert


def test_an_expert_that_nobody_has():
    """Rows that are sent to no expert of this process count for nothing."""
    stack = sparsify(make_zeroed("mixtral")).model.layers[0].mlp.experts.gate_up_proj
    x, chosen = torch.randn(3, stack.columns), torch.tensor([1, 3, 4])
    output = stack(x, chosen)
    assert torch.allclose(output[:2], torch.stack([stack.dense()[e] @ row for e, row in zip((1, 3), x)]), atol=1e-5)
    assert not output[2].any()


@pytest.mark.parametrize(
    "family, name, why",
    [
        ("mixtral", "model.layers.1.mlp.experts", "not smaller packed"),
        ("llama4_text", "model.layers.1.feed_forward.experts", "a Llama4TextExperts has no packed form"),
    ],
)
def test_experts_that_stay_dense_are_named(family, name, why, ids):
    """Also if only one of their weights would be smaller."""
    model = make_zeroed(family)
    experts = model.get_submodule(name)
    if family == "mixtral":
        experts.down_proj.data.normal_(std=0.1)
    expected = logits(model, ids)
    sparsify(model)
    assert isinstance(experts.down_proj, torch.nn.Parameter) and isinstance(experts.gate_up_proj, torch.nn.Parameter)
    assert model.packing.left_dense[name] == why
    assert_close(logits(model, ids), expected)
    assert_close(logits(densify(model), ids), expected)


def test_other_functions(ids):
    """A function that is chosen for all layers is for the dense ones; a dense layer computes as ever with the packed one."""
    model, other = sparsify(make_zeroed("mixtral")), make_model("mixtral")
    expected, packed = logits(other, ids), logits(model, ids)
    other.set_experts_implementation(FUNCTION)
    model.set_experts_implementation("eager")
    assert_close(logits(other, ids), expected)
    assert torch.equal(logits(model, ids), packed)


def test_two_models_of_one_config(ids):
    """Whether one is packed or dense again changes nothing for the other."""
    first = make_zeroed("mixtral")
    second = type(first)(first.config).eval()
    second.load_state_dict(first.state_dict())
    function, expected = first.config._experts_implementation, logits(first, ids)
    sparsify(first)
    assert torch.equal(logits(second, ids), expected)
    packed = logits(sparsify(second), ids)
    densify(first)
    assert first.config._experts_implementation == function
    assert torch.equal(logits(first, ids), expected) and torch.equal(logits(second, ids), packed)
