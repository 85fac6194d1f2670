"""NeuronAL: sparsity by block, then by row, chosen by the alignment of dense and sparse activations (the paper)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..blocks.statistics import SquaredNorms
from ..common.validation import hyper
from ..model.projections import Decoder
from ..saliency import Saliency
from ..saliency.plan import SparsityPlan
from ..saliency.wanda import Wanda
from ..trials import Trials
from ..trials.alignment import METRICS, REFERENCES, SCOPES, AlignmentErrors
from ..trials.deviation import Deviation, Deviations
from ..trials.reconstruction_errors import ReconstructionErrors
from . import neuronal_authors
from .base import (
    SCHEDULES,
    Allocation,
    TopUp,
    get_dist,
    pruned_blocks,
    register_topup,
    rise,
    rounded,
    spread_over_blocks,
    uniform_plan,
)


LAMBDAS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.10, 0.12, 0.15, 0.20, 0.25)
PRINTED = tuple(lam for lam in LAMBDAS if lam != 0.04)  # as the paper's appendix lists them; its tables have 0.04
STEPS = ("both", "block", "row")
BLOCK_STEP, ROW_STEP = "comparing sparsities by block", "comparing sparsities by row"
RECONSTRUCTION = "reconstruction"


# What a variant decides unless the user does.
FIELDS = ("steps", "reference", "alignment_scope", "block_lambdas", "row_lambdas")
VARIANTS: dict[str, tuple] = {
    "sequence": ("block", "sparse-stream", "sequence", LAMBDAS, (0.0, *LAMBDAS)),
    "authors": ("both", "sparse-stream", "pooled", LAMBDAS, (0.0, *LAMBDAS)),
    "printed": ("both", "dense", "sequence", PRINTED, (0.0, *PRINTED)),
}


@register_topup("neuronal")
@dataclass(frozen=True)
class NeuronAL(TopUp):
    """The paper's algorithm: each of its two steps takes the lambda with the lowest alignment error.

    Where rows cannot differ (SparseGPT) or are not understood, only the block step is taken, and the report says so. With
    a saliency that updates weights, candidates are masks from Wanda's score; the other two variants solve each of them.

    Args:
        steps (`str`, *optional*):
            `"both"` (block, then row), `"block"`, or `"row"` (from uniform sparsity). None: both if `row_lambdas` is
            given, or else the variant's.
        variant (`str`):
            `"sequence"`: the block step alone, with each candidate's own stream as the authors' code has it, and errors
            by sequence as the paper has them. `"authors"`: what their code does for the paper's figures, see
            [`neuronal_authors`]. `"printed"`: the paper to the letter, see [`printed_deviation`] and [`block_plan`].
        reference (`str`, *optional*): `"sparse-stream"` or `"dense"`: where dense activations come from, see
            [`Trials.alignment_errors`]. None, here and below: the variant's.
        alignment_scope (`str`, *optional*): `"sequence"` or `"pooled"`, see [`alignment_error`].
        block_lambdas, row_lambdas (`tuple[float, ...]`, *optional*): half-widths of the sparsity window to try, in
            [0, 1]. One number forces a published choice.
        metric (`str`):
            Distance between normalized activations: `"l2"`, the paper's, or `"cosine"` or `"kl"`, of its ablation
            ("NeuronAL vs. Reconstruction Error and Distance Metrics"). Or `"reconstruction"`, the change of each
            projection's outputs for equal inputs, see [`reconstruction_errors`]; the row step still takes its
            directions from the activations.
        schedule (`str`):
            How sparsity rises from the first block to the last: `"linear"`, or `"exponential"` (late) or
            `"logarithmic"` (early), of the paper's "Non-Uniform Block-Wise Sparsity Distribution". The mean is kept.
    """

    paper: ClassVar[str] = (
        "Cunegatti et al., Zeroth-Order Adaptive Neuron Alignment Based Pruning without Re-Training, TMLR 2025"
    )

    steps: str | None = hyper(None, choices=STEPS)
    variant: str = hyper("sequence", choices=tuple(VARIANTS))
    reference: str | None = hyper(None, choices=REFERENCES)
    alignment_scope: str | None = hyper(None, choices=SCOPES)
    block_lambdas: tuple[float, ...] | None = hyper(None, 0, 1)
    row_lambdas: tuple[float, ...] | None = hyper(None, 0, 1)
    metric: str = hyper("l2", choices=(*METRICS, RECONSTRUCTION))
    schedule: str = hyper("linear", choices=tuple(SCHEDULES))

    def __post_init__(self):
        if self.steps is None and self.row_lambdas is not None:
            object.__setattr__(self, "steps", "both")
        for name, value in zip(FIELDS, VARIANTS[self.variant]):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def _measured_on(self) -> tuple[str, str, str]:
        return self.reference, self.alignment_scope, "l2" if self.metric == RECONSTRUCTION else self.metric

    def forwards(self, decoder: Decoder, saliency: Saliency, aligned: int, samples: int) -> int:
        runs = aligned * (2 if self.reference == REFERENCES[0] else 1) * self._count(saliency)
        return len(decoder.blocks) * runs

    def solves(self, saliency: Saliency) -> float:
        return 0 if self._ranks_by_wanda(saliency) else self._count(saliency)

    def _count(self, saliency: Saliency) -> int:
        rows = self.steps != "block" and saliency.knows_rows
        return (self.steps != "row") * len(self.block_lambdas) + rows * len(self.row_lambdas)

    def _ranks_by_wanda(self, saliency: Saliency) -> bool:
        return saliency.updates_weights and self.variant == "sequence"

    def allocate(self, trials: Trials, sparsity: float) -> Allocation:
        base, decisions, saliency = uniform_plan(trials.decoder, sparsity), {}, trials.saliency
        if self.variant == "authors" and self.alignment_scope == "pooled":
            norms = saliency.statistic if saliency.updates_weights else neuronal_authors.RunningNorms
            trials = replace(trials, norms=norms)
        if self._ranks_by_wanda(saliency):  # to solve every candidate would take as long as a prune each
            trials = replace(trials, saliency=Wanda())
        if self.steps != "row":
            base, decisions["block"] = self._block_step(trials, sparsity)
        plan, problem = rounded(trials, base, self.variant), rows_problem(trials.decoder, saliency)
        if self.steps != "block" and problem is None:
            plan, decisions["row"] = self._row_step(trials, base, plan)
        elif self.steps != "block":
            decisions["note"] = f"no row step: {problem}"
        return Allocation(plan, decisions, trials.norms if saliency.uses_activations else SquaredNorms)

    def _block_step(self, trials: Trials, sparsity: float) -> tuple[SparsityPlan, dict]:
        """Choose how far sparsity rises from the first block to the last (paper, section 4.1.1)."""
        lambdas = self.block_lambdas
        if self.variant == "authors" and sparsity >= 0.8 and lambdas == LAMBDAS:
            lambdas = lambdas[:-1]
        make = neuronal_authors.block_plan if self.variant == "authors" else block_plan
        plans = [make(trials.decoder, sparsity, lam, self.schedule) for lam in lambdas]
        errors = self._errors(trials, [rounded(trials, plan, self.variant) for plan in plans], BLOCK_STEP)
        return _decide(plans, lambdas, errors)

    def _errors(
        self, trials: Trials, plans: Sequence[SparsityPlan], label: str, known: dict[int, float] | None = None
    ) -> list[float]:
        """Return errors of the candidates, of which some are known: index -> error. Others may stop above those.

        None: the middle one runs first.
        """
        if self.metric == RECONSTRUCTION:
            return trials.measure(ReconstructionErrors(self.reference, label), plans)
        question = AlignmentErrors(*self._measured_on, label)
        if known is None and trials.can_abandon and len(plans) > 2:
            middle = len(plans) // 2
            known = {middle: trials.measure(question, [plans[middle]])[0]}
        known = known or {}
        others = [plan for index, plan in enumerate(plans) if index not in known]
        bound = min(known.values()) if known and trials.can_abandon else math.inf
        found = iter(trials.measure(replace(question, bound=bound), others) if others else [])
        return [known[index] if index in known else next(found) for index in range(len(plans))]

    def _row_step(self, trials: Trials, base: SparsityPlan, plan: SparsityPlan) -> tuple[SparsityPlan, dict]:
        """Choose how much less to prune rows that deviate more from the dense model (paper, section 4.1.2)."""
        lambdas, known = self.row_lambdas, None
        kind = "printed" if self.variant == "printed" else "signed"
        deviation = trials.measure(Deviations(*self._measured_on, "measuring how rows deviate", kind), [plan])
        make = neuronal_authors.row_plan if self.variant == "authors" else row_plan
        plans = [make(trials.decoder, base, lam, deviation) for lam in lambdas]
        if self.variant != "authors":  # lambda 0 is the plan without rows, which the others must beat
            plans = [own if lam else plan for lam, own in zip(lambdas, plans)]
            known = {index: deviation.error for index, lam in enumerate(lambdas) if not lam}
        return _decide(plans, lambdas, self._errors(trials, plans, ROW_STEP, known))


def rows_problem(decoder: Decoder, saliency: Saliency) -> str | None:
    """Return why the rows of a model cannot differ, or None if they can."""
    if not saliency.knows_rows:
        return f"{saliency.name!r} updates all rows of a weight together"
    try:
        for block in decoder.blocks:
            for projection in block.pruned:
                decoder.row_groups(block, projection)
    except ValueError as error:
        return str(error)
    return None


def block_plan(decoder: Decoder, sparsity: float, lam: float, schedule: str = "linear") -> SparsityPlan:
    """Return a plan with one sparsity per pruned block, which rises by `2 * lam` from first to last around the mean.

    With the paper's `v_i = i`, its Eq. 4 would prune later blocks less. The closed form below it, and its text, want the
    opposite, so v is negative here: `s - lam + 2 lam (i - 1) / (B - 1)`.
    """
    blocks = pruned_blocks(decoder)
    return spread_over_blocks(blocks, sparsity, lam, -rise(len(blocks), schedule))


def row_plan(decoder: Decoder, base: SparsityPlan, lam: float, deviation: Deviation) -> SparsityPlan:
    """Spread the base plan's sparsity of every projection over its rows, by the deviation at the place they feed."""
    plan = {}
    for block in decoder.blocks:
        for projection in block.pruned:
            sparsity, place = base.sparsity[projection.name], decoder.place_fed_by(block, projection)
            rows = torch.full((projection.shape[0],), sparsity, dtype=torch.float64)
            for group in decoder.row_groups(block, projection):
                rows[group.rows] = get_dist(sparsity, lam, group.values(deviation.places[place.name]))
            plan[projection.name] = rows
    return SparsityPlan(plan)


def _decide(
    plans: Sequence[SparsityPlan], lambdas: Sequence[float], errors: Sequence[float]
) -> tuple[SparsityPlan, dict]:
    """Return the best plan and the report's entry. A candidate that was stopped early has no error."""
    best = errors.index(min(errors))
    candidates = [{"lambda": lam, "error": error if error < math.inf else None} for lam, error in zip(lambdas, errors)]
    return plans[best], {"lambda": lambdas[best], "candidates": candidates}
