"""Changes of weights as tensors, and back."""

import pytest
import torch

from optimum_neuronal.packed.change import NewWeight, Zeros
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.formats.stored_changes import has_parts, of_parts, parts_of


WEIGHT = torch.randn(70, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
STEPPED = QuantizedWeight.encode(
    torch.arange(630).remainder(8).to(torch.uint8).view(70, 9), 3, torch.ones(70).bfloat16(), torch.ones(9).bfloat16()
)


@pytest.mark.parametrize(
    "change",
    [
        Zeros(WEIGHT > 0.5),
        NewWeight(WEIGHT.masked_fill(WEIGHT > 0.5, 0)),
        *(QuantizedWeight.nearest(WEIGHT, bits) for bits in range(2, 9)),
        STEPPED,
    ],
    ids=lambda change: f"{type(change).__name__} {getattr(change, 'bits', '')}",
)
def test_there_and_back(change):
    other = parts_of(QuantizedWeight.nearest(WEIGHT, 4), WEIGHT, "a.b.c")
    tensors = parts_of(change, WEIGHT, "a.b") | other
    assert has_parts(tensors, "a.b") and not has_parts(tensors, "a") and not has_parts(other, "a.b")
    found = of_parts(tensors, "a.b", (70, 9), torch.bfloat16)
    assert torch.equal(found.applied(WEIGHT), change.applied(WEIGHT))
    if isinstance(change, QuantizedWeight):
        assert isinstance(found, QuantizedWeight) and found.bits == change.bits
        assert (found.steps is None) == (change.steps is None)
