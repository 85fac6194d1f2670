"""NeuronAL: sparsity by block, then by row, chosen by the alignment of dense and sparse activations (the paper)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..common.validation import check_choice, check_numbers
from ..model.projections import Decoder
from ..saliency import Saliency
from ..saliency.plan import SparsityPlan
from ..saliency.wanda import Wanda
from ..trials import Trials
from ..trials.alignment import METRICS, SCOPES, Deviation
from ..trials.solved import SHARES, SolvedSparsities
from ..trials.trials import REFERENCES
from .base import Allocation, TopUp, get_dist, index_of_smallest, register_topup, spread_over_blocks, uniform_plan


LAMBDAS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.10, 0.12, 0.15, 0.20, 0.25)
STEPS = ("both", "block", "row")
CANDIDATES = ("wanda", "solved", "exact")
RECONSTRUCTION = "reconstruction"

# Position of a block from 0 (first) to 1 (last) -> rise of its sparsity, from 0 to 1. The paper has no formula for the
# last two: here they mirror each other on the diagonal.
SCHEDULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda position: position,
    "exponential": lambda position: position.exp().sub(1) / (math.e - 1),
    "logarithmic": lambda position: position.mul(math.e - 1).log1p(),
}


@register_topup("neuronal")
@dataclass(frozen=True)
class NeuronAL(TopUp):
    """The paper's algorithm: each of its two steps takes the lambda with the lowest alignment error.

    With a saliency that updates all rows of a weight together, such as SparseGPT, only the block step is taken.

    Args:
        steps (`str`): `"both"` (block, then row), `"block"`, or `"row"` (from uniform sparsity).
        reference (`str`): `"sparse-stream"` or `"dense"`: where dense activations come from, see
            [`Trials.alignment_errors`].
        alignment_scope (`str`): `"sequence"` or `"pooled"`, see [`alignment_error`].
        block_lambdas, row_lambdas (`tuple[float, ...]`): half-widths of the sparsity window to try, in [0, 1].
        metric (`str`):
            Distance between normalised activations: `"l2"`, the paper's, or `"cosine"` or `"kl"`, of its ablation
            ("NeuronAL vs. Reconstruction Error and Distance Metrics"). Or `"reconstruction"`, the change of each
            projection's outputs for equal inputs, see [`reconstruction_errors`]; the row step still takes its
            directions from the activations.
        schedule (`str`):
            How sparsity rises from the first block to the last: `"linear"`, or `"exponential"` (late) or
            `"logarithmic"` (early), of the paper's "Non-Uniform Block-Wise Sparsity Distribution". The mean is kept.
        candidates (`str`):
            How candidates are made if the saliency updates weights: `"wanda"`, by masks from Wanda's score; `"solved"`,
            by weights solved once at a few sparsities, see [`SolvedSparsities`]; `"exact"`, by solving each, which
            takes as long as one prune per candidate.
    """

    steps: str = "both"
    reference: str = "sparse-stream"
    alignment_scope: str = "sequence"
    block_lambdas: tuple[float, ...] = LAMBDAS
    row_lambdas: tuple[float, ...] = (0.0, *LAMBDAS)
    metric: str = "l2"
    schedule: str = "linear"
    candidates: str = CANDIDATES[0]

    def __post_init__(self):
        check_choice("steps", self.steps, STEPS)
        check_choice("reference", self.reference, REFERENCES)
        check_choice("alignment_scope", self.alignment_scope, SCOPES)
        check_choice("metric", self.metric, (*METRICS, RECONSTRUCTION))
        check_choice("schedule", self.schedule, tuple(SCHEDULES))
        check_choice("candidates", self.candidates, CANDIDATES)
        for name in ("block_lambdas", "row_lambdas"):
            lambdas = check_numbers(name, getattr(self, name), 0, 1)
            if len(set(lambdas)) != len(lambdas):
                raise ValueError(f"{name} is {lambdas}: expected each number once.")
            object.__setattr__(self, name, lambdas)

    def _has_rows(self, saliency: Saliency) -> bool:
        return self.steps != "block" and saliency.knows_rows

    @property
    def _reconstructs(self) -> bool:
        return self.metric == RECONSTRUCTION

    @property
    def _measured_on(self) -> tuple[str, str, str]:
        return self.reference, self.alignment_scope, "l2" if self._reconstructs else self.metric

    def check(self, decoder: Decoder) -> None:
        for block in decoder.blocks if self.steps != "block" else ():
            for projection in block.pruned:
                decoder.row_groups(block, projection)

    def forwards(self, decoder: Decoder, saliency: Saliency, aligned: int, samples: int) -> int:
        runs = aligned * (2 if self.reference == REFERENCES[0] else 1) * self._count(saliency)
        return len(decoder.blocks) * (runs + samples * (self._made_of(saliency) == "solved"))

    def solves(self, saliency: Saliency) -> int:
        return {"wanda": 0, "solved": len(SHARES), "exact": self._count(saliency)}[self._made_of(saliency)]

    def _count(self, saliency: Saliency) -> int:
        return (self.steps != "row") * len(self.block_lambdas) + self._has_rows(saliency) * len(self.row_lambdas)

    def _made_of(self, saliency: Saliency) -> str:
        return self.candidates if saliency.updates_weights else "exact"

    def allocate(self, trials: Trials, sparsity: float) -> Allocation:
        plan, decisions, saliency = uniform_plan(trials.decoder, sparsity), {}, trials.saliency
        if (made_of := self._made_of(saliency)) != "exact":
            solved = trials.solve(SolvedSparsities.around(sparsity)) if made_of == "solved" else None
            trials = replace(trials, saliency=Wanda(), solved=solved)
        if self.steps != "row":
            plan, decisions["block"] = self._block_step(trials, sparsity)
        if self._has_rows(saliency):
            plan, decisions["row"] = self._row_step(trials, plan)
        elif self.steps != "block":
            decisions["note"] = f"no row step: {saliency.name!r} updates all rows of a weight together"
        return Allocation(plan, decisions)

    def _block_step(self, trials: Trials, sparsity: float) -> tuple[SparsityPlan, dict]:
        """Choose how far sparsity rises from the first block to the last (paper, section 3.1.1)."""
        plans = [block_plan(trials.decoder, sparsity, lam, self.schedule) for lam in self.block_lambdas]
        errors = self._block_errors(trials, plans)
        best = index_of_smallest(errors)
        return plans[best], _decision(self.block_lambdas, errors, best)

    def _block_errors(self, trials: Trials, plans: Sequence[SparsityPlan]) -> list[float]:
        """Return errors of the candidates. The middle one runs first; others may stop once they cannot beat it."""
        label, middle = "Block step", len(plans) // 2
        if self._reconstructs:
            return trials.reconstruction_errors(plans, self.reference, label)
        if not trials.can_abandon or len(plans) < 3:
            return trials.alignment_errors(plans, *self._measured_on, label=label)
        (first,) = trials.alignment_errors([plans[middle]], *self._measured_on, label=label)
        others = [*plans[:middle], *plans[middle + 1 :]]
        errors = trials.alignment_errors(others, *self._measured_on, label=label, bound=first)
        return [*errors[:middle], first, *errors[middle:]]

    def _row_step(self, trials: Trials, base: SparsityPlan) -> tuple[SparsityPlan, dict]:
        """Choose how much less to prune rows that deviate more from the dense model (paper, section 3.1.2)."""
        deviation = trials.deviation(base, *self._measured_on, label="Row deviations")
        zero = [0.0] if 0.0 in self.row_lambdas else []  # the base plan: the others must beat it
        lambdas = [lam for lam in self.row_lambdas if lam != 0]
        plans = row_plans(trials.decoder, base, lambdas, deviation)
        if self._reconstructs:
            errors = trials.reconstruction_errors([base] * len(zero) + plans, self.reference, "Row step")
        else:
            bound = deviation.error if zero and trials.can_abandon else math.inf
            errors = [deviation.error] * len(zero)
            if plans:
                errors += trials.alignment_errors(plans, *self._measured_on, label="Row step", bound=bound)
        tried = dict(zip(zero + lambdas, zip(errors, [base] * len(zero) + plans)))
        errors = [tried[lam][0] for lam in self.row_lambdas]
        best = index_of_smallest(errors)
        return tried[self.row_lambdas[best]][1], _decision(self.row_lambdas, errors, best)


def block_plan(decoder: Decoder, sparsity: float, lam: float, schedule: str = "linear") -> SparsityPlan:
    """Return a plan with one sparsity per block, which rises by `2 * lam` from the first to the last around the mean."""
    position = torch.arange(len(decoder.blocks), dtype=torch.float64) / max(len(decoder.blocks) - 1, 1)
    # Negative, since large values are pruned less.
    return spread_over_blocks(decoder.blocks, sparsity, lam, -SCHEDULES[schedule](position))


def row_plans(
    decoder: Decoder, base: SparsityPlan, lambdas: Sequence[float], deviation: Deviation
) -> list[SparsityPlan]:
    """Spread the base plan's sparsity of every projection over its rows, by the deviation at the place they feed."""
    plans: list[dict[str, torch.Tensor]] = [{} for _ in lambdas]
    for block in decoder.blocks:
        for projection in block.pruned:
            place = decoder.place_fed_by(block, projection)
            groups = decoder.row_groups(block, projection)
            parts = [(group.rows, group.values(deviation.places[place.name])) for group in groups]
            for plan, lam in zip(plans, lambdas):
                rows = torch.full((projection.shape[0],), base.sparsity[projection.name], dtype=torch.float64)
                for indices, values in parts:
                    rows[indices] = get_dist(base.sparsity[projection.name], lam, values)
                plan[projection.name] = rows
    return [SparsityPlan(plan) for plan in plans]


def _decision(lambdas: Sequence[float], errors: Sequence[float], best: int) -> dict:
    """Return the report's entry. A candidate that was stopped early has no error."""
    candidates = [{"lambda": lam, "error": error if error < math.inf else None} for lam, error in zip(lambdas, errors)]
    return {"lambda": lambdas[best], "candidates": candidates}
