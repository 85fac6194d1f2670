"""NeuronAL: sparsity by block, then by row, chosen by the alignment of dense and sparse activations (the paper)."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ..common.registry import title_of
from ..common.validation import hyper
from ..model.projections import Block, Decoder, Projection
from ..saliency import Saliency
from ..saliency.plan import Plan
from ..saliency.wanda import Wanda
from ..trials import PlanEvaluator
from ..trials.alignment import (
    METRICS,
    REFERENCES,
    SCOPES,
    AlignmentErrors,
    Deviation,
    Deviations,
    ReconstructionErrors,
)
from .base import Allocation, TopUp, register_topup
from .distribution import SCHEDULES, distribute_over_blocks, get_dist, pruned_blocks, rise


LAMBDAS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.10, 0.12, 0.15, 0.20, 0.25)
STEPS = ("both", "block", "row")
BLOCK_STEP, ROW_STEP = "comparing sparsities by block", "comparing sparsities by row"
RECONSTRUCTION = "reconstruction"


@register_topup("neuronal")
@dataclass(frozen=True)
class NeuronAL(TopUp):
    """The paper's algorithm: each of its two steps takes the lambda with the lowest alignment error.

    Where rows cannot differ (SparseGPT) or are not understood, only the block step is taken, and the report says so. With
    a saliency that updates weights, candidates are masks from Wanda's score.

    This variant, `"sequence"`, takes the block step alone, with each candidate's own stream as in the authors' code,
    and errors by sequence as in the paper. [`AuthorsNeuronAL`] and [`PrintedNeuronAL`] are the other variants.

    Args:
        steps (`str`, *optional*):
            `"both"` (block, then row), `"block"`, or `"row"` (from uniform sparsity). None: both if `row_lambdas` is
            given, or else the variant's.
        reference (`str`, *optional*): `"sparse-stream"` or `"dense"`: where dense activations come from, see
            [`AlignmentErrors`]. None, here and below: the variant's.
        alignment_scope (`str`, *optional*): `"sequence"` or `"pooled"`, see [`alignment_error`].
        block_lambdas, row_lambdas (`tuple[float, ...]`, *optional*): half-widths of the sparsity window to try, in
            [0, 1]. One number forces a published choice.
        final_scores (`str`, *optional*):
            `"sparse-stream"` or `"dense"`: whether weights are scored for the final masks on the hidden states of the
            pruned blocks or, as in Algorithm 1, of the dense model.
        metric (`str`):
            Distance between normalized activations: `"l2"`, the paper's, or `"cosine"` or `"kl"`, of its ablation
            ("NeuronAL vs. Reconstruction Error and Distance Metrics"). Or `"reconstruction"`, the change of each
            projection's outputs for equal inputs, see [`ReconstructionErrors`]; the row step still takes its
            directions from the activations.
        schedule (`str`):
            How sparsity rises from the first block to the last: `"linear"`, or `"exponential"` (late) or
            `"logarithmic"` (early), of the paper's "Non-Uniform Block-Wise Sparsity Distribution". The mean is kept.
    """

    paper: ClassVar[str] = (
        "Cunegatti et al., Zeroth-Order Adaptive Neuron Alignment Based Pruning without Re-Training, TMLR 2025"
    )

    variant: ClassVar[str] = "sequence"
    summary: ClassVar[str] = (
        "NeuronAL decided where the sparsity goes, in this package's variant of the paper's method."
    )
    variant_fields: ClassVar[Mapping[str, Any]] = {  # instead of None
        "steps": "block",
        "reference": "sparse-stream",
        "alignment_scope": "sequence",
        "block_lambdas": LAMBDAS,
        "row_lambdas": (0.0, *LAMBDAS),
        "final_scores": "sparse-stream",
    }
    deviation_kind: ClassVar[str] = "signed"

    steps: str | None = hyper(None, choices=STEPS)
    reference: str | None = hyper(None, choices=REFERENCES)
    alignment_scope: str | None = hyper(None, choices=SCOPES)
    block_lambdas: tuple[float, ...] | None = hyper(None, 0, 1)
    row_lambdas: tuple[float, ...] | None = hyper(None, 0, 1)
    final_scores: str | None = hyper(None, choices=REFERENCES)
    metric: str = hyper("l2", choices=(*METRICS, RECONSTRUCTION))
    schedule: str = hyper("linear", choices=tuple(SCHEDULES))

    def __post_init__(self):
        if self.steps is None and self.row_lambdas is not None:
            object.__setattr__(self, "steps", "both")
        for name, value in self.variant_fields.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def title(self, saliency: Saliency | None = None) -> str:
        with_rows = self.steps != "block" and (saliency is None or saliency.knows_rows)
        steps = [name for name, taken in (("block", self.steps != "row"), ("row", with_rows)) if taken]
        text = f"{' and '.join(steps)} step{'s' if len(steps) > 1 else ''}" if steps else "no step"
        return title_of(self, [text], {**self.variant_fields, "steps": self.steps})

    @property
    def scores_dense(self) -> bool:
        return self.final_scores == "dense"

    def candidate_evaluator(self, evaluator: PlanEvaluator) -> PlanEvaluator:
        """Return the evaluator that measures candidates."""
        # Solving each candidate would take as long as a pruning run.
        return replace(evaluator, saliency=Wanda()) if evaluator.saliency.updates_weights else evaluator

    def lambdas_of_blocks(self, sparsity: float) -> Sequence[float]:
        """Return the lambdas that the block step tries."""
        return self.block_lambdas

    def block_plan(self, decoder: Decoder, sparsity: float, lam: float) -> Plan:
        """Return a plan with one sparsity per pruned block, which rises by `2 * lam` from first to last around the mean.

        With the paper's `v_i = i`, its Eq. 4 would prune later blocks less. The closed form below it, and its text, want the
        opposite, so v is negative here: `s - lam + 2 lam (i - 1) / (B - 1)`.
        """
        return distribute_over_blocks(decoder, sparsity, lam, -rise(len(pruned_blocks(decoder)), self.schedule))

    def as_pruned(self, evaluator: PlanEvaluator, plan: Plan) -> Plan:
        """Return the plan of blocks as it is pruned. A variant may round it."""
        return plan

    def row_plans(
        self, decoder: Decoder, base: Plan, plan: Plan, deviation: Deviation
    ) -> tuple[list[Plan], dict[int, float] | None]:
        """Return the candidates of the row step, and the errors of those that need no measurement, by index."""
        # Lambda 0 is the plan without rows, which the others must beat.
        plans = [row_plan(decoder, base, lam, deviation) if lam else plan for lam in self.row_lambdas]
        return plans, {index: deviation.error for index, lam in enumerate(self.row_lambdas) if not lam}

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        decisions, saliency = {}, evaluator.saliency
        evaluator = self.candidate_evaluator(evaluator)
        if self.steps == "row":
            base = self.block_plan(evaluator.decoder, sparsity, 0.0)
        else:
            base, decisions["block"] = self._block_step(evaluator, sparsity)
        plan = self.as_pruned(evaluator, base)
        if self.steps != "block":
            if problem := rows_problem(evaluator.decoder, saliency):
                decisions["note"] = f"no row step: {problem}"
            else:
                plan, decisions["row"] = self._row_step(evaluator, base, plan)
        return Allocation(plan, decisions, evaluator.norms)

    def _block_step(self, evaluator: PlanEvaluator, sparsity: float) -> tuple[Plan, dict]:
        """Choose how far sparsity rises from the first block to the last (paper, section 4.1.1)."""
        lambdas = self.lambdas_of_blocks(sparsity)
        plans = [self.block_plan(evaluator.decoder, sparsity, lam) for lam in lambdas]
        errors = self._errors(evaluator, [self.as_pruned(evaluator, plan) for plan in plans], BLOCK_STEP)
        return _decide(plans, lambdas, errors)

    def _row_step(self, evaluator: PlanEvaluator, base: Plan, plan: Plan) -> tuple[Plan, dict]:
        """Choose how much less to prune rows that deviate more from the dense model (paper, section 4.1.2)."""
        measurement = Deviations(*self._measured_on, "measuring how rows deviate", self.deviation_kind)
        deviation = evaluator.measure(measurement, [plan])
        plans, known = self.row_plans(evaluator.decoder, base, plan, deviation)
        return _decide(plans, self.row_lambdas, self._errors(evaluator, plans, ROW_STEP, known))

    @property
    def _measured_on(self) -> tuple[str, str, str]:
        return self.reference, self.alignment_scope, "l2" if self.metric == RECONSTRUCTION else self.metric

    def _errors(
        self, evaluator: PlanEvaluator, plans: Sequence[Plan], label: str, known: dict[int, float] | None = None
    ) -> list[float]:
        """Return the errors of candidates. They may stop once they exceed the lowest of the `known` errors, by index.

        None: the middle one runs first.
        """
        if self.metric == RECONSTRUCTION:
            return evaluator.measure(ReconstructionErrors(self.reference, label), plans)
        measurement = AlignmentErrors(*self._measured_on, label)
        if known is None and evaluator.can_abandon and len(plans) > 2:
            middle = len(plans) // 2
            known = {middle: evaluator.measure(measurement, [plans[middle]])[0]}
        known = known or {}
        others = [plan for index, plan in enumerate(plans) if index not in known]
        bound = min(known.values()) if known and evaluator.can_abandon else math.inf
        errors = iter(evaluator.measure(replace(measurement, bound=bound), others) if others else [])
        return [known[index] if index in known else next(errors) for index in range(len(plans))]


def rows_problem(decoder: Decoder, saliency: Saliency) -> str | None:
    """Return why the rows of a model cannot differ, or None if they can."""
    if not saliency.knows_rows:
        return f"{saliency.name!r} updates all rows of a weight together"
    try:
        for block in decoder.blocks:
            for projection in block.pruned:
                row_groups(decoder, block, projection)
    except ValueError as error:
        return str(error)
    return None


def row_plan(decoder: Decoder, base: Plan, lam: float, deviation: Deviation) -> Plan:
    """Spread the base plan's sparsity of every projection over its rows, by the deviation at the place they feed."""
    plan = {}
    for block in decoder.blocks:
        for projection in block.pruned:
            sparsity, place = base.sparsity[projection.name], decoder.place_fed_by(block, projection)
            rows = torch.full((projection.shape[0],), sparsity, dtype=torch.float64)
            for group in row_groups(decoder, block, projection):
                rows[group.rows] = get_dist(sparsity, lam, group.values(deviation.places[place.name]))
            plan[projection.name] = rows
    return Plan(plan)


@dataclass(frozen=True)
class RowGroup:
    """Rows of one kind in a projection, such as q in a fused qkv, and the features that each of them feeds."""

    rows: torch.Tensor  # indices in the projection's weight: int64, shape (n,)
    features: torch.Tensor  # int64, shape (n, served)

    def values(self, place: torch.Tensor) -> torch.Tensor:
        """Return for each row, shape (n,), the mean of `place`, shape (in,), over the features that the row feeds."""
        return place[self.features.to(place.device)].mean(dim=1)


def row_groups(decoder: Decoder, block: Block, projection: Projection) -> list[RowGroup]:
    """Group the rows of a projection by kind, with the features that each row feeds. Without a role there is no group.

    Raise `ValueError` if the features are not known.
    """
    if projection.role is None:
        return []
    place, rows = decoder.place_fed_by(block, projection), torch.arange(projection.shape[0])
    groups, fits = [], False
    with suppress(AttributeError, RuntimeError, ZeroDivisionError):  # a size that the config lacks, or a bad view
        if place is not None:
            groups = _group(projection.role, rows, torch.arange(place.features), decoder.config)
            fits = torch.equal(torch.cat([group.rows for group in groups]).sort().values, rows)
            fits = fits and all(len(group.rows) == len(group.features) for group in groups)
            fits = fits and max(group.features.max() for group in groups) + 1 == place.features
    if not fits:
        raise ValueError(
            f"The row step does not understand {projection.name}, whose {len(rows)} rows have the role {projection.role!r}. "
            f"Use steps='block', or leave it out with ignore=[{re.escape(projection.name)!r}]."
        )
    return groups


def _group(role: str, rows: torch.Tensor, features: torch.Tensor, config: Any) -> list[RowGroup]:
    """Return the groups of a role for the indices of its rows and of the features of the place that they feed."""
    if role == "gate_up":
        return [RowGroup(half, features[:, None]) for half in rows.chunk(2)]
    if role not in ("key", "value", "qkv", "interleaved_qkv"):
        return [RowGroup(rows, features[:, None])]
    heads = features.view(config.num_attention_heads, -1)
    size, fused = heads.shape[1], role.endswith("qkv")
    kv_heads = (len(rows) - len(features)) // (2 * size) if fused else len(rows) // size
    # A row of k or v serves all queries of its group.
    served = heads.view(kv_heads, -1, size).transpose(1, 2).flatten(0, 1)
    if role == "qkv":
        parts = rows.split([len(features), len(served), len(served)])
    elif role == "interleaved_qkv":
        grouped = rows.view(kv_heads, -1, size)
        parts = [part.flatten() for part in (grouped[:, :-2], grouped[:, -2], grouped[:, -1])]
    else:
        return [RowGroup(rows, served)]
    return [RowGroup(part, fed) for part, fed in zip(parts, (features[:, None], served, served))]


def _decide(plans: Sequence[Plan], lambdas: Sequence[float], errors: Sequence[float]) -> tuple[Plan, dict]:
    """Return the best plan and the report's entry. A candidate that was stopped early has no error."""
    best = errors.index(min(errors))
    candidates = [{"lambda": lam, "error": error if error < math.inf else None} for lam, error in zip(lambdas, errors)]
    return plans[best], {"lambda": lambdas[best], "candidates": candidates}
