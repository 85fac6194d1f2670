"""Few bits: the solver of a prune that quantises. A plan gives each projection its bits in place of a sparsity."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..model.packed_size import has_steps
from ..packed.change import Change
from ..packed.formats.quantized import QuantizedWeight
from .base import Solver
from .masks import ColumnPattern
from .plan import DENSE
from .quantiser import Quantiser


@dataclass(frozen=True)
class FewBits(Solver):
    """Solver that quantises weights, see [`Quantiser`]. It is not a choice among saliencies: `bits_per_weight` asks for it.

    Args:
        paths (`bool`): False for trials: less work, and some 5 % more error.
    """

    name: ClassVar[str] = "few-bits"
    knows_rows: ClassVar[bool] = False
    reconstruct: ClassVar[str] = "dense"

    paths: bool = True

    def solve(
        self,
        weights: Mapping[str, torch.Tensor],
        hessian: torch.Tensor,
        amounts: Mapping[str, float | torch.Tensor],
        dtype: torch.dtype,
        pattern: ColumnPattern | None = None,
        shared: bool = False,
    ) -> dict[str, Change]:
        quantiser, changes = Quantiser(hessian, ", ".join(weights), quick=not self.paths), {}
        for name, weight in weights.items():
            bits = int(amounts[name])
            if bits == DENSE or pattern is not None:
                raise ValueError(
                    f"{name} was given {bits} bits and the pattern {pattern}: expected 2 to 8, and no pattern."
                )
            codes, scales, steps, _ = quantiser.quantise(weight, bits, has_steps(len(weight), bits, shared))
            changes[name] = QuantizedWeight.encode(codes, bits, scales, steps, dtype)
        return changes

    def quick(self) -> "FewBits":
        return replace(self, paths=False)
