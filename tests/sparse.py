"""Sparse models to train, and their zeros, found without the package."""

import copy
from functools import cache

import torch
from conftest import make_model

from optimum_neuronal import NeuronALConfig, NeuronALPruner


def make_sparse(family="llama", sparsity=0.7, **overrides):
    """Return a tiny model that is pruned by magnitude: once for a session, and copied."""
    model = copy.deepcopy(_pruned(family, sparsity, tuple(sorted(overrides.items()))))
    torch.manual_seed(0)
    return model


@cache
def _pruned(family, sparsity, overrides):
    config = NeuronALConfig(sparsity, saliency="magnitude", topup="uniform")
    return NeuronALPruner(config).prune(make_model(family, **dict(overrides)))


def zeros_of(model, least=0.25) -> dict[str, torch.Tensor]:
    """Where the weights of matrices with a larger share of zeros are zero; by their names without adapters."""
    zeros = {}
    for name, weight in model.named_parameters():
        zero, name = weight == 0, name.replace("base_layer.", "").removeprefix("base_model.model.")
        if zero.ndim > 1 and zero.float().mean() > least and "lora_" not in name and "hada_" not in name:
            zeros[name] = zero
    return zeros


def same_zeros(model, zeros) -> bool:
    """Whether exactly the same weights are zero: none came back, and none was lost for good."""
    now = zeros_of(model)
    return now.keys() == zeros.keys() and all(torch.equal(now[name], zero) for name, zero in zeros.items())


def step(model, optimizer, ids, max_norm=None):
    model(input_ids=ids, labels=ids).loss.backward()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
