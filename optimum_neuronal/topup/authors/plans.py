"""Plans as the authors' code makes them: it bounds, rounds and averages sparsities in its own way.

Masks depend on the last bit of these numbers, so the order of operations is that of their numpy code.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...model.projections import Block, Decoder
from ...saliency.plan import Plan
from ...trials import Trials
from ..spread import LEAST_SPARSITY, MOST_SPARSITY, plan_of_blocks, pruned_blocks


def rounded(trials: Trials, plan: Plan) -> Plan:
    """Return the plan that prunes `int(in * sparsity)` weights of a row, or the same if the saliency updates weights."""
    if trials.saliency.updates_weights:
        return plan
    widths = {name: projection.shape[1] for name, projection in trials.decoder.projections.items()}
    return Plan({name: int(widths[name] * share) / widths[name] for name, share in plan.sparsity.items()})


def shifted(blocks: Sequence[Block], density: np.ndarray, sparsity: float) -> Plan:
    """Return the plan of densities that are shifted to the target. The mean moves again if sparsities leave (0, 1)."""
    values = 1 - (density - np.mean(density) + (1 - sparsity))
    values = np.where(values <= 0, LEAST_SPARSITY, np.where(values >= 1, MOST_SPARSITY, values))
    return plan_of_blocks(blocks, torch.from_numpy(values))


def spread_over_blocks(decoder: Decoder, sparsity: float, lam: float, values: torch.Tensor) -> Plan:
    """Return the plan that prunes blocks with large values less. The authors weight blocks equally."""
    array = values.numpy()
    density = (array - array.min()) * (1 / (np.ptp(array) or 1) * lam * 2)
    return shifted(pruned_blocks(decoder), density, sparsity)
