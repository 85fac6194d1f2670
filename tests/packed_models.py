"""Tiny models with random zeros, and packed ones."""

import copy
from functools import cache

import torch
from conftest import make_model

from optimum_neuronal import sparsify
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import token_weights
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.packed_module import packed_modules
from optimum_neuronal.packed.replacing import keeps_transposed, packable_parameter, packable_paths, put_packed
from optimum_neuronal.packed.sparsify import finish_packing, pack_head
from optimum_neuronal.pruning.final_pass import put_quantized


DENSE = ("embed", "wte", "wpe", "lm_head", "router", "gate.weight", "norm")


def zero(model, sparsity=0.7, seed=0):
    """Sets a share of every weight of a model's projections to zero; returns it."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and not any(part in name for part in DENSE):
            weight.data[torch.rand(weight.shape, generator=generator) < sparsity] = 0
    return model


def make_zeroed(family="llama", sparsity=0.7, **overrides):
    """A tiny model of a family with zeros."""
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


def assert_close(found: torch.Tensor, expected: torch.Tensor, relative=1e-5) -> None:
    assert (found - expected).abs().max() <= relative * expected.abs().max()


def pack(model, bits=None, embedding_bits=None):
    """Pack a model in place as `sparsify` does; with `bits` round its linear layers and experts to so many instead."""
    if bits is None:
        return sparsify(model, embedding_bits=embedding_bits)
    head = model.get_output_embeddings()
    for path in [p for name, m in model.named_modules() if m is not head for p in packable_paths(m, name)]:
        weight = packable_parameter(model, path).detach()
        dense = weight.mT if keeps_transposed(model, path) else weight
        put_packed(model, path, QuantizedWeight.nearest(dense.reshape(-1, dense.shape[-1]), bits))
    finish_packing(model, pack_head(model) if embedding_bits else None)
    return model


def make_low_bit(family="llama", sparse=False, dtype=torch.float32, **overrides):
    """Return a model whose projections have 2, 3, 4 and 8 bits in turn. `sparse`: those of the first block are sparse."""
    return copy.deepcopy(_made(family, sparse, dtype, tuple(overrides.items())))


@cache
def _made(family, sparse, dtype, overrides):
    model = make_zeroed(family, **dict(overrides)).to(dtype)
    decoder, weights = find_decoder(model), {}
    for number, (name, projection) in enumerate(decoder.projections.items()):
        if not sparse or not name.startswith(decoder.blocks[0].name + "."):
            weights[name] = _quantized(projection, (2, 3, 4, 8)[number % 4])
    head = {name: QuantizedWeight.nearest(weight) for name, weight in token_weights(model).items()}
    put_quantized(decoder, weights, head)
    if sparse:
        sparsify(model)
    return model.eval()


def _quantized(projection, bits: int) -> QuantizedWeight:
    weight = projection.weight.contiguous()
    if projection.expert is not None:
        return QuantizedWeight.nearest(weight, 3)
    steps = torch.linspace(0.5, 2, weight.shape[1]).bfloat16()
    rounded = QuantizedWeight.nearest((weight.float() / steps.float()).to(weight.dtype), bits)
    return QuantizedWeight(rounded.codes, rounded.scales, steps, bits, rounded.shape, rounded.dtype)


def held(model) -> dict[str, str]:
    """Return the format of every packed module by name."""
    return {name: module.format for name, module in packed_modules(model)}
