"""Plans as the authors' code makes them: it bounds, rounds and averages sparsities in its own way.

Masks depend on the last bit of these numbers, so the order of operations is that of their numpy code.
"""

import numpy as np

from ...saliency.plan import Plan
from ...trials import PlanEvaluator
from ..distribution import LEAST_SPARSITY, MOST_SPARSITY


def rounded(evaluator: PlanEvaluator, plan: Plan) -> Plan:
    """Return the plan that prunes `int(in * sparsity)` weights of a row, or the same if the saliency updates weights."""
    if evaluator.saliency.updates_weights:
        return plan
    widths = {name: projection.shape[1] for name, projection in evaluator.decoder.projections.items()}
    return Plan({name: int(widths[name] * share) / widths[name] for name, share in plan.sparsity.items()})


def distribute(values: np.ndarray, sparsity: float, lam: float) -> np.ndarray:
    """Return sparsities in a window of `2 * lam`, lower where values are larger, all of shape (blocks,).

    Blocks are weighted equally. The mean moves away from `sparsity` if a sparsity leaves (0, 1).
    """
    density = (values - values.min()) * (1 / (np.ptp(values) or 1) * lam * 2)
    sparsities = 1 - (density - np.mean(density) + (1 - sparsity))
    return np.where(sparsities <= 0, LEAST_SPARSITY, np.where(sparsities >= 1, MOST_SPARSITY, sparsities))
