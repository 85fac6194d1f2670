"""Low-bit weights: the solver for plans that give bits instead of sparsities."""

from dataclasses import dataclass, replace
from typing import ClassVar

from ..model.packed_size import has_steps
from ..packed.change import Change
from ..packed.formats.quantized import QuantizedWeight
from .base import Solver
from .quantizer import Quantizer


@dataclass(frozen=True)
class LowBit(Solver):
    """Quantizes weights if the config sets `bits_per_weight`. It is not registered as a saliency."""

    name: ClassVar[str] = "low-bit"
    knows_rows: ClassVar[bool] = False
    reconstruct: ClassVar[str] = "dense"

    paths: bool = True  # False for trials, which take half the work

    def solve(self, weights, hessian, amounts, dtype, pattern=None, shared=False) -> dict[str, Change]:
        quantizer, changes = Quantizer(hessian, ", ".join(weights), quick=not self.paths), {}
        for name, weight in weights.items():
            bits = int(amounts[name])
            codes, scales, steps = quantizer.quantize(weight, bits, has_steps(len(weight), bits, shared))
            changes[name] = QuantizedWeight.encode(codes, bits, scales, steps, dtype)
        return changes

    def quick(self) -> "LowBit":
        return replace(self, paths=False)
