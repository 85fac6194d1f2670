"""AlphaPruning as in the authors' code."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...model.projections import Block
from ...saliency.plan import Plan
from ...trials import PlanEvaluator
from ..alpha_pruning import AlphaPruning
from ..base import register_topup
from ..distribution import authors_rounding, plan_of_blocks, pruned_blocks


@register_topup("alpha_pruning", variant="authors")
@dataclass(frozen=True)
class AuthorsAlphaPruning(AlphaPruning):
    """Takes the tail that fits a power law best. Sparsities above 1 become 1 without raising the others."""

    def exponent(self, eigenvalues: torch.Tensor) -> float | None:
        return fitted_exponent(eigenvalues, self.bins)

    def plan(self, evaluator: PlanEvaluator, sparsity: float, alphas: torch.Tensor) -> Plan:
        blocks = pruned_blocks(evaluator.decoder)
        return authors_rounding(
            evaluator, plan_of_blocks(blocks, block_sparsities(blocks, alphas, sparsity, self.epsilon))
        )


def block_sparsities(blocks: Sequence[Block], alphas: torch.Tensor, sparsity: float, epsilon: float) -> torch.Tensor:
    """Return sparsities in proportion to factors from `1 - epsilon` to `1 + epsilon`, float64 of shape (blocks,).

    Their code sums over projections. Sizes are integers there, whose product with a Python number is float32.
    """
    least, most = 1.0 - epsilon, 1.0 + epsilon
    span = (alphas.max() - alphas.min()) or 1
    counts = torch.tensor([len(block.pruned) for block in blocks])
    sizes = torch.tensor([projection.numel for block in blocks for projection in block.pruned])
    factors = (alphas - alphas.min()) / span * (most - least) + least
    scale = sizes.sum() * sparsity / (sizes * factors.repeat_interleave(counts)).sum()
    return (factors * scale).clamp(max=1)


def fitted_exponent(eigenvalues: torch.Tensor, bins: int = 100) -> float | None:
    """Return the exponent, in float32, of the tail with the smallest Kolmogorov-Smirnov distance from its power law."""
    values = eigenvalues[eigenvalues > 0].cpu().sort().values
    if not len(values):
        return None
    logs, decades = values.log(), values.log10()
    counts = torch.histc(decades, bins, min=decades[0].item(), max=decades[-1].item())
    peak = 10 ** torch.linspace(decades[0].item(), decades[-1].item(), bins + 1)[counts.argmax()]
    smallest, exponent = 1.0, None
    for first, least in enumerate(values[:-1]):
        if (0.95 * peak).log10() <= least <= 1.5 * peak:  # a logarithm by mistake: hardly a lower limit
            count = len(values) - first
            alpha = 1 + count / (logs[first:].sum() - count * logs[first])
            law = 1 - (values[first:] / least) ** (1 - alpha)
            distance = (law - torch.arange(count) / count).abs().max()
            if alpha > 1 and distance < smallest:
                smallest, exponent = distance, alpha.item()
    return exponent
