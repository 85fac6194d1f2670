"""Tiny models with random zeros, and what they are compared by."""

import torch
from conftest import make_model


DENSE_PARTS = ("embed", "wte", "wpe", "lm_head", "router", "gate.weight", "norm")


def zero(model, sparsity=0.7, seed=0):
    """Set a share of every weight of a model's projections to zero, and return the model."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and not any(part in name for part in DENSE_PARTS):
            weight.data[torch.rand(weight.shape, generator=generator) < sparsity] = 0
    return model


def make_zeroed(family="llama", sparsity=0.7, **overrides):
    """Return a tiny model of a family with zeros."""
    return zero(make_model(family, **overrides), sparsity)


def assert_same_state(model, expected: dict) -> None:
    """Names, dtypes and bits are those of another model's state."""
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert state[name].dtype == value.dtype and state[name].shape == value.shape, name
        bits = (value.contiguous().view(-1).view(torch.uint8), state[name].contiguous().view(-1).view(torch.uint8))
        assert torch.equal(*bits), name


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def assert_close(computed: torch.Tensor, expected: torch.Tensor, relative=1e-5) -> None:
    assert (computed - expected).abs().max() <= relative * expected.abs().max()
