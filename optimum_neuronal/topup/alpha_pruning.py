"""AlphaPruning: blocks whose weights have light-tailed spectra, a sign of less learning, are pruned more."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..common.validation import hyper
from ..model.projections import Block
from ..trials import Trials
from ..trials.block_scores import WeightScores
from .base import (
    BASELINE_VARIANTS,
    LARGEST,
    Allocation,
    TopUp,
    bisect,
    block_sizes,
    plan_of_blocks,
    pruned_blocks,
    register_topup,
    rounded,
)


@register_topup("alpha_pruning")
@dataclass(frozen=True)
class AlphaPruning(TopUp):
    """Sparsity by the heavy-tailed self-regularization of the weights (Lu et al., AlphaPruning, NeurIPS 2024).

    The tail of a projection's spectrum, the eigenvalues of `W^T W`, follows a power law. A block's alpha is the mean of
    its projections' exponents. Sparsity is linear in alpha, from `1 - epsilon` to `1 + epsilon` times a common one, and
    at most 0.99. The tail begins at the spectrum's peak, as in the paper. Needs no calibration data.

    Args:
        spread (`float`): the paper's epsilon, in [0, 1): how far sparsities may lie from the mean, relative to it.
        bins (`int`): bins of the histogram of the eigenvalues' logarithms, in whose highest bin the tail begins.
        variant (`str`): `"authors"`, their code as it was run: docs/methods.md says what differs.
    """

    paper: ClassVar[str] = "Lu et al., AlphaPruning: Using Heavy-Tailed Self Regularization Theory, NeurIPS 2024"
    uses_calibration: ClassVar[bool] = False

    spread: float = hyper(0.3, 0, LARGEST)
    bins: int = hyper(100, 1)
    variant: str = hyper("corrected", choices=BASELINE_VARIANTS)

    def allocate(self, trials: Trials, sparsity: float) -> Allocation:
        estimate = fitted_exponent if self.variant == "authors" else hill_exponent

        def exponents(block: Block) -> list[float | None]:
            spectra = (torch.linalg.svdvals(projection.weight.float()).square() for projection in block.pruned)
            return [estimate(spectrum, self.bins) for spectrum in spectra]

        spectra = trials.measure(
            WeightScores(f"measuring spectra of weights ({self.bins} bins, {self.variant})", exponents)
        )
        alphas, blocks = block_alphas([found for found in spectra if found]), pruned_blocks(trials.decoder)
        factors, sizes = scale_factors(torch.tensor(alphas, dtype=torch.float64), self.spread), block_sizes(blocks)
        if self.variant == "authors":
            found = (factors * (sizes.sum() * sparsity / (sizes * factors).sum())).clamp(max=1)
        else:
            found = scaled_sparsities(sparsity, factors, sizes)
        plan = rounded(trials, plan_of_blocks(blocks, found), self.variant)
        return Allocation(plan, {"alpha_pruning": {"alphas": alphas}})


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


def fitted_exponent(eigenvalues: torch.Tensor, bins: int = 100) -> float | None:
    """Return the exponent, in float32, of the tail with the smallest Kolmogorov-Smirnov distance from its power law."""
    values = eigenvalues[eigenvalues > 0].cpu().sort().values
    if not len(values):
        return None
    logs, decades = values.log(), values.log10()
    counts = torch.histc(decades, bins, min=decades[0].item(), max=decades[-1].item())
    peak = 10 ** torch.linspace(decades[0].item(), decades[-1].item(), bins + 1)[counts.argmax()]
    smallest, found = 1.0, None
    for first, least in enumerate(values[:-1]):
        if (0.95 * peak).log10() <= least <= 1.5 * peak:  # a logarithm by mistake: hardly a lower limit
            count = len(values) - first
            alpha = 1 + count / (logs[first:].sum() - count * logs[first])
            law = 1 - (values[first:] / least) ** (1 - alpha)
            distance = (law - torch.arange(count) / count).abs().max()
            if alpha > 1 and distance < smallest:
                smallest, found = distance, alpha.item()
    return found


def block_alphas(exponents: list[list[float | None]]) -> list[float]:
    """Return the mean of every block's known exponents; where none is known, the mean of the other blocks."""
    known = [[exponent for exponent in block if exponent is not None] for block in exponents]
    means = [sum(block) / len(block) for block in known if block]
    others = sum(means) / len(means) if means else 1.0
    return [sum(block) / len(block) if block else others for block in known]


def scale_factors(alphas: torch.Tensor, spread: float) -> torch.Tensor:
    """Return factors of a common sparsity: linear in alpha, in [1 - spread, 1 + spread], shape (blocks,)."""
    if alphas.max() == alphas.min():
        return torch.ones_like(alphas)
    return 1 - spread + 2 * spread * (alphas - alphas.min()) / (alphas.max() - alphas.min())


def scaled_sparsities(sparsity: float, factors: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return sparsities in proportion to factors above 0, at most 0.99; their mean, weighted by sizes, is `sparsity`.

    factors, sizes and result: float64, shape (blocks,).
    """
    if sparsity > LARGEST:
        return torch.full_like(factors, sparsity)
    weights = sizes / sizes.sum()
    plain = sparsity * factors / (factors * weights).sum()
    if plain.max() <= LARGEST:
        return plain

    def is_too_small(scale: float) -> bool:  # clipping raises the common scale
        return bool(((factors * scale).clamp(max=LARGEST) * weights).sum() < sparsity)

    scale = bisect(is_too_small, 0.0, LARGEST / factors.min().item(), 60)
    return (factors * scale).clamp(max=LARGEST)
