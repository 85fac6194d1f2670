"""Quantises a model with rates for each matrix as the package does, but its weights by a rival: GPTQ, or trellis codes."""

import math
from dataclasses import dataclass, replace

import torch

from benchmarks.gptq import GPTQ
from benchmarks.trellis import trellis_coded
from optimum_neuronal import NeuronALConfig
from optimum_neuronal.model.packed_size import has_steps
from optimum_neuronal.packed.change import NewWeight
from optimum_neuronal.packed.formats.quantized import quantized_bytes
from optimum_neuronal.pruning.calibrating import draw_calibration
from optimum_neuronal.pruning.context import check
from optimum_neuronal.pruning.final_pass import apply_changes
from optimum_neuronal.pruning.prune import find_changes
from optimum_neuronal.saliency.few_bits import FewBits
from optimum_neuronal.topup.rates import RATES


RIVALS = ("gptq", "trellis")
OVERHEAD = {"gptq": 0.5, "trellis": 0.0}  # bits a weight beside codes: groups of 64, and one scale for a matrix


@dataclass(frozen=True)
class Rival(FewBits):
    """Solver of the final pass. Trials are the package's, and so are the rates.

    Args:
        rival (`str`): of `RIVALS`.
    """

    rival: str = RIVALS[0]

    def quick(self):
        return FewBits(paths=False)

    def solve(self, weights, hessian, amounts, dtype, pattern=None, shared=False):
        def quantised(name: str, weight: torch.Tensor) -> torch.Tensor:
            bits = int(amounts[name])
            if self.rival == "trellis":
                return trellis_coded(weight, hessian, bits, name)
            return GPTQ(bits).prune(weight, hessian, 0.0, name=name)

        return {name: NewWeight(quantised(name, weight).to(dtype)) for name, weight in weights.items()}


def quantise_by(rival: str, budget: float, model, ids: torch.Tensor) -> float:
    """Quantise a dense model in place within a budget of bits a weight. Return the bits that its weights take."""
    config = NeuronALConfig(bits_per_weight=budget, dataset=None, num_samples=len(ids))
    context = check(model, config)
    shapes = {name: projection.shape for name, projection in context.decoder.projections.items()}
    weights = sum(math.prod(shape) for shape in shapes.values())
    least = sum(quantized_bytes(shape, RATES[0], has_steps(shape[0], RATES[0], False)) for shape in shapes.values())
    own = 8 * least / weights - RATES[0]  # of the package's scales and steps, which the rivals have not
    rates = replace(context.methods.topup, budget=budget - OVERHEAD[rival] + own)
    outcome = find_changes(
        replace(
            context,
            methods=replace(context.methods, saliency=Rival(rival=rival), topup=rates),
            calibration=draw_calibration(model, config, dataset=ids),
        )
    )
    apply_changes(context.decoder, outcome.changes)
    bits = outcome.allocation.plan.amounts
    return OVERHEAD[rival] + sum(bits[name] * math.prod(shape) for name, shape in shapes.items()) / weights
