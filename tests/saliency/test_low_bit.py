import torch

from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.saliency.low_bit import LowBit
from optimum_neuronal.saliency.quantizer import Quantizer


def layer(rows=24, columns=16):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(100, columns, generator=generator)
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs


def test_each_weight_gets_its_own_bits_and_the_projections_dtype():
    weight, hessian = layer()
    weights, bits = {"q": weight, "k": weight[:8], "v": weight[8:]}, {"q": 2, "k": 8, "v": 4, "other": 3}
    found = LowBit().solve(weights, hessian, bits, torch.bfloat16)
    assert list(found) == ["q", "k", "v"]
    for name, change in found.items():
        assert isinstance(change, QuantizedWeight) and change.bits == bits[name] and change.dtype == torch.bfloat16
        codes, scales, steps = Quantizer(hessian).quantize(weights[name], bits[name])
        expected = QuantizedWeight.encode(codes, bits[name], scales, steps)
        assert torch.equal(change.codes, expected.codes) and torch.equal(change.scales, expected.scales)
        change.check()
