"""AlphaPruning: blocks whose weights have light-tailed spectra, a sign of less learning, are pruned more."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ..common.validation import hyper
from ..model.projections import Block
from ..saliency.plan import Plan
from ..trials import PlanEvaluator
from ..trials.scores import BlockScores
from .base import Allocation, TopUp, register_topup
from .distribution import MOST_SPARSITY, authors_rounding, bisect, block_sizes, plan_of_blocks, pruned_blocks


@register_topup("alpha_pruning")
@dataclass(frozen=True)
class AlphaPruning(TopUp):
    """Sparsity by the heavy-tailed self-regularization of the weights (Lu et al., AlphaPruning, NeurIPS 2024).

    The tail of a projection's spectrum, the eigenvalues of `W^T W`, follows a power law. A block's alpha is the mean of
    its projections' exponents. Sparsity is linear in alpha, from `1 - epsilon` to `1 + epsilon` times a common value,
    and at most 0.99. The tail begins at the spectrum's peak, as in the paper. Needs no calibration data.

    Args:
        epsilon (`float`): the paper's epsilon, in [0, 1): how far sparsities may lie from the mean, relative to it.
        bins (`int`): bins of the histogram of the eigenvalues' logarithms; the tail begins in the highest one.
    """

    paper: ClassVar[str] = "Lu et al., AlphaPruning: Using Heavy-Tailed Self Regularization Theory, NeurIPS 2024"
    uses_calibration: ClassVar[bool] = False

    epsilon: float = hyper(0.3, 0, MOST_SPARSITY)
    bins: int = hyper(100, 1)

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        def exponents(block: Block, _activations: dict[str, torch.Tensor]) -> list[float | None]:
            spectra = (torch.linalg.svdvals(projection.weight.float()).square() for projection in block.pruned)
            return [self.exponent(spectrum) for spectrum in spectra]

        label = f"measuring spectra of weights ({self.bins} bins, {self.variant})"
        alphas = block_alphas(evaluator.measure_once(BlockScores(label, exponents, needs_inputs=False)))
        plan = self.plan(evaluator, sparsity, torch.tensor(alphas, dtype=torch.float64))
        return Allocation(plan, {"alpha_pruning": {"alphas": alphas}})

    def exponent(self, eigenvalues: torch.Tensor) -> float | None:
        """Return the exponent of a spectrum's tail, or None if it has none. eigenvalues: shape (n,), in any order."""
        return hill_exponent(eigenvalues, self.bins)

    def plan(self, evaluator: PlanEvaluator, sparsity: float, alphas: torch.Tensor) -> Plan:
        """Return the plan that prunes blocks more the larger their alpha; alphas: float64, shape (blocks,)."""
        factors, sizes = scale_factors(alphas, self.epsilon), block_sizes(evaluator.decoder)
        return plan_of_blocks(evaluator.decoder, scaled_sparsities(sparsity, factors, sizes))


def hill_exponent(eigenvalues: torch.Tensor, bins: int = 100) -> float | None:
    """Return the Hill estimate of a spectrum's power-law exponent; its tail begins at the peak ("Fix-finger").

    `alpha = 1 + k / sum of ln(lambda_i / lambda_min)` over the k eigenvalues above `lambda_min`, the smallest in the
    first fullest bin of a histogram of their logarithms. eigenvalues: non-negative, shape (n,), in any order; zeros
    within rounding are left out. None if no eigenvalue lies above `lambda_min`.
    """
    values = eigenvalues.double().cpu().sort().values
    rounding = (torch.finfo(eigenvalues.dtype).eps * len(values)) ** 2  # relative accuracy of singular values, squared
    values = values[values > rounding * values[-1:]]
    if not len(values):
        return None
    logs = values.log()
    counts = torch.histc(logs, bins, min=logs[0].item(), max=logs[-1].item())
    peak = int((counts == counts.max()).nonzero()[0])
    edge = logs[0] + (logs[-1] - logs[0]) * peak / bins
    first = int((logs < edge).sum())
    excess = (logs[first + 1 :] - logs[first]).sum().item()
    return 1 + (len(logs) - first - 1) / excess if excess > 0 else None


def block_alphas(exponents: list[list[float | None]]) -> list[float]:
    """Return the mean of every block's known exponents; where none is known, the mean of the other blocks."""
    known = [[exponent for exponent in block if exponent is not None] for block in exponents]
    others = float(np.mean([np.mean(block) for block in known if block] or [1.0]))
    return [float(np.mean(block)) if block else others for block in known]


def scale_factors(alphas: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return factors of a common sparsity: linear in alpha, in [1 - epsilon, 1 + epsilon], shape (blocks,)."""
    if alphas.max() == alphas.min():
        return torch.ones_like(alphas)
    return 1 - epsilon + 2 * epsilon * (alphas - alphas.min()) / (alphas.max() - alphas.min())


def scaled_sparsities(sparsity: float, factors: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return sparsities in proportion to factors above 0, at most 0.99; their mean, weighted by sizes, is `sparsity`.

    factors, sizes and result: float64, shape (blocks,).
    """
    if sparsity > MOST_SPARSITY:
        return torch.full_like(factors, sparsity)
    weights = sizes / sizes.sum()
    plain = sparsity * factors / (factors * weights).sum()
    if plain.max() <= MOST_SPARSITY:
        return plain

    def is_too_small(scale: float) -> bool:  # clipping raises the common scale
        return bool(((factors * scale).clamp(max=MOST_SPARSITY) * weights).sum() < sparsity)

    scale = bisect(is_too_small, 0.0, MOST_SPARSITY / factors.min().item(), 60)
    return (factors * scale).clamp(max=MOST_SPARSITY)


@register_topup("alpha_pruning", variant="authors")
@dataclass(frozen=True)
class AuthorsAlphaPruning(AlphaPruning):
    """As in the authors' code: takes the tail that fits a power law best. Sparsities above 1 become 1 without raising the others."""

    def exponent(self, eigenvalues: torch.Tensor) -> float | None:
        return fitted_exponent(eigenvalues, self.bins)

    def plan(self, evaluator: PlanEvaluator, sparsity: float, alphas: torch.Tensor) -> Plan:
        sparsities = authors_sparsities(pruned_blocks(evaluator.decoder), alphas, sparsity, self.epsilon)
        return authors_rounding(evaluator, plan_of_blocks(evaluator.decoder, sparsities))


def authors_sparsities(blocks: Sequence[Block], alphas: torch.Tensor, sparsity: float, epsilon: float) -> torch.Tensor:
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
