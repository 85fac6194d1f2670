"""Models with weights in every packed form: few bits with and without steps, 8-bit embeddings, sparse and dense projections."""

import copy
from functools import cache

import torch
from packed_models import make_zeroed

from optimum_neuronal import sparsify
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.weight_names import token_weights
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.packed_module import packed_modules
from optimum_neuronal.pruning.final_pass import put_quantized


BITS = (2, 3, 4, 8)


def make_few_bits(family="llama", sparse=False, dtype=torch.float32, **overrides):
    """Return a model whose projections have 2, 3, 4 and 8 bits in turn, and steps where no experts share a weight.

    Args:
        family (`str`): of [`make_model`].
        sparse (`bool`): True: the first block's are sparse instead.
        dtype (`torch.dtype`): of the model.
        overrides: of the family's config.
    """
    return copy.deepcopy(_made(family, sparse, dtype, tuple(overrides.items())))


@cache
def _made(family, sparse, dtype, overrides):
    model = make_zeroed(family, **dict(overrides)).to(dtype)
    decoder, weights = find_decoder(model), {}
    for number, (name, projection) in enumerate(decoder.projections.items()):
        if not sparse or not name.startswith(decoder.blocks[0].name + "."):
            weights[name] = _quantized(projection, BITS[number % 4])
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
