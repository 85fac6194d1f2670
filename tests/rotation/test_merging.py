import math

import pytest
import torch
from conftest import make_model
from families import FAMILIES
from profiles import at_night
from trial_helpers import state
from turning import logits, random_rotations, rotated_of, ties, uneven

from optimum_neuronal.demo.run import SEQ_LENGTH, TEST_WINDOWS, TINY_MODEL, load_tiny_model
from optimum_neuronal.evaluation.perplexity import evaluate_perplexity, load_windows
from optimum_neuronal.model.architectures import find_architecture
from optimum_neuronal.rotation.merging import Originals, Rotations


ROTATED = [family for family in FAMILIES if find_architecture(family).rotates]


def close(found, expected) -> float:
    """The largest difference, relative to how much the expected values vary."""
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("family", ROTATED)
def test_the_function_stays_and_every_weight_comes_back(family, ids):
    """For any orthogonal matrices, with norm weights and biases that matter."""
    model, ids = uneven(make_model(family)), ids[:2]
    before, tied, config = state(model), ties(model), model.config
    expected, rotated = logits(model, ids), rotated_of(model)
    originals, unties = Originals(rotated), rotated.unties
    assert unties == (tied[0] and rotated.rotates_stream)
    originals.merge(random_rotations(rotated))
    assert close(logits(model, ids), expected) < 2e-5
    for own in rotated.blocks:
        for projection in own.projections:
            key = next(name for name, value in model.named_parameters() if value is projection.owner)
            assert not torch.equal(projection.owner, before[key]), f"{key} is rotated"
    if unties:
        assert not ties(model)[0] and not model.config.tie_word_embeddings and not model.all_tied_weights_keys
        assert config.tie_word_embeddings, "another model may share it"
    originals.restore()
    assert ties(model) == tied and model.config is config
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"head_dim": 12, "num_key_value_heads": 1},
    ],
    ids=["biases", "tied", "one head"],
)
def test_settings_of_llama(overrides, ids):
    """Biases of what writes into the stream, a head that is tied though llama's is not, many query heads for one."""
    model = uneven(make_model("llama", **overrides))
    before, tied, expected, rotated = state(model), ties(model), logits(model, ids[:2]), rotated_of(model)
    originals = Originals(rotated)
    originals.merge(random_rotations(rotated))
    assert close(logits(model, ids[:2]), expected) < 2e-5
    originals.restore()
    assert ties(model) == tied and all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype, ids):
    """Rotated in float64: weights are those of the float64 model, rounded."""
    narrow = uneven(make_model("qwen2")).to(dtype)
    wide = make_model("qwen2").double()
    wide.load_state_dict(narrow.state_dict())
    rotated = rotated_of(wide)
    rotations = random_rotations(rotated)
    expected = logits(wide, ids[:2])
    Originals(rotated).merge(rotations)
    assert close(logits(wide, ids[:2]), expected) < 1e-5  # norms compute in float32
    originals, before = Originals(rotated_of(narrow)), state(narrow)
    originals.merge(rotations)
    for (name, found), exact in zip(narrow.named_parameters(), wide.parameters()):
        assert found.dtype == dtype
        assert torch.equal(found, exact.to(dtype)), name
    originals.restore()
    assert all(torch.equal(value, before[key]) for key, value in narrow.state_dict().items())


@at_night
def test_a_trained_model_in_bf16_loses_nothing_to_any_rotation():
    """Rounding changes a token's negative log-likelihood by less than 0.001 nats in the mean."""
    model, tokenizer = load_tiny_model()
    windows = load_windows(model.config, tokenizer, str(TINY_MODEL / "heldout.txt"), SEQ_LENGTH, TEST_WINDOWS)
    rotated = rotated_of(model.bfloat16())
    before = math.log(evaluate_perplexity(model, None, windows))
    Originals(rotated).merge(random_rotations(rotated))
    assert 0 < abs(math.log(evaluate_perplexity(model, None, windows)) - before) < 1e-3


def test_no_rotation_folds_the_norms_alone(llama, ids):
    expected, before, rotated = logits(uneven(llama), ids[:2]), state(llama), rotated_of(llama)
    Originals(rotated).merge(Rotations.identity(rotated))
    assert close(logits(llama, ids[:2]), expected) < 1e-5
    for own in rotated.blocks:
        for norm, readers in own.folds:
            assert bool((norm.weight == 1).all()) and len(readers) >= 2
    first = rotated.blocks[0].block.module
    scale = before["model.layers.0.input_layernorm.weight"]
    expected = (before["model.layers.0.self_attn.q_proj.weight"].double() * scale.double()).float()
    assert torch.equal(first.self_attn.q_proj.weight, expected)
    assert torch.equal(first.mlp.down_proj.weight, before["model.layers.0.mlp.down_proj.weight"])
