"""Search: zeroth-order search over blocks, kinds of projections, and rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..common.validation import hyper
from ..model.projections import Decoder, Projection
from ..saliency.plan import Plan
from ..trials import PlanEvaluator
from ..trials.output_errors import OutputErrors
from ..trials.scores import RowSaliency
from .base import Allocation, TopUp, register_topup
from .distribution import LEAST_SPARSITY, MOST_SPARSITY, get_dist, shift_to_mean


FIRST_STEP, LAST_STEP = 0.1, 0.015  # change of sparsity by a probe: in the first rounds, and at least
# Length of a candidate on a round's line, in steps -> factor of the next step if this candidate is best.
LENGTHS = {0.6: 0.7, 1.2: 1.0, 2.1: 1.4}
NOTHING_FOUND = 0.4  # factor of the next step if no candidate on the line is better than the plan so far
BLOCK_WIDTHS = (0.05, 0.1, 0.2)
ROW_WIDTHS = (0.05, 0.1)  # wider ones gain on the calibration sequences and lose on others
BUDGET = 58  # the passes of NeuronAL's two steps: 29 candidates, each run dense and sparse
STREAM_COST = 2  # a plan's own stream: every block dense, then sparse
NEGLIGIBLE = 1e-9


@register_topup("search")
@dataclass(frozen=True)
class Search(TopUp):
    """Search with forwards of a few sequences, without gradients or training; see docs/methods.md.

    A candidate's error is the KL divergence from the dense model's next-token distributions.

    1. *Blocks*: sparsity rises linearly with depth; the best of a few slopes wins.
    2. *Rounds*: a candidate probes each direction. Odd rounds give a kind of projections more sparsity and all others
       less. Even rounds do so in the late half of the blocks, and probe slope and curvature over depth and the
       outermost blocks. Three candidates on the line of steepest descent follow, and decide the next step along these
       directions. The best of all candidates replaces the plan so far if it is better.
    3. *Rows*: rows with a small sum of saliency get more sparsity than others of their projection.

    Saliency is measured on the stream of the plan that the round began with. With a saliency that updates weights, the
    first stage solves its candidates, and the others only mask them.

    Args:
        budget (`int`): passes of the alignment sequences through the model, at most, but the first stage always runs
            whole. NeuronAL's two steps take 58.
        rows (`bool`): True to take the third stage.
        widths (`tuple[float, ...]`): half-widths of the block stage's sparsity windows, in [0, 1].
    """

    compares_outputs: ClassVar[bool] = True

    budget: int = hyper(BUDGET, 8)
    rows: bool = True
    widths: tuple[float, ...] = hyper(BLOCK_WIDTHS, 0, 1)

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        space = Space.of(evaluator.decoder, sparsity)
        if not LEAST_SPARSITY < sparsity < MOST_SPARSITY or len(space.sizes) == 1:  # nothing can be moved
            return Allocation(space.plan(space.uniform))
        rows = len(ROW_WIDTHS) + STREAM_COST if self.rows and evaluator.saliency.knows_rows else 0
        run = _Run(evaluator, space, self.budget - 1)  # minus one: the dense model
        errors = run.try_out([space.uniform + width * space.depth for width in self.widths])
        run.stages.append({"stage": "blocks", "errors": errors, "chosen": errors.index(min(errors))})
        while run.advance_to_affordable_round(run.budget - rows):
            run.take_round()
        if rows and run.spent + rows <= run.budget:
            run.spread_rows()
        return Allocation(run.best_plan, {"search": {"stages": run.stages, "spent": run.spent + 1}})


@dataclass
class _Run:
    """State of a search: the best sparsities so far, their error, and the passes spent."""

    evaluator: PlanEvaluator
    space: "Space"
    budget: int
    spent: float = 0
    rounds: int = 0
    steps: list[float] = field(default_factory=lambda: [FIRST_STEP, FIRST_STEP])  # of odd and of even rounds
    error: float = math.inf
    best: torch.Tensor | None = None
    best_plan: Plan | None = None
    stages: list[dict] = field(default_factory=list)

    def advance_to_affordable_round(self, budget: float) -> bool:
        """Make the next round odd or even, in turn if affordable. Return False if neither is."""
        for number in (self.rounds, self.rounds + 1):
            if self.space.directions(number) and self.spent + self.cost_of_round(number) <= budget:
                self.rounds = number
                return True
        return False

    def cost_of_round(self, number: int) -> float:
        return STREAM_COST + self.space.cost(list(self.space.directions(number).values())) + len(LENGTHS)

    def measure(self, plans: Sequence[Plan], stream_of: Plan | None, cost: float) -> list[float]:
        self.spent += cost
        return self.evaluator.measure(OutputErrors("kl", "searching sparsities by projection", stream_of), plans)

    def restart(self) -> None:
        """Measure the best plan with saliency from its own stream, as its rivals in this round."""
        (self.error,) = self.measure([self.best_plan], self.best_plan, STREAM_COST)

    def take_round(self) -> None:
        self.restart()
        directions, step = self.space.directions(self.rounds), self.steps[self.rounds % 2]
        began, base, start = self.error, self.best, self.best_plan
        rises = self.try_out([base + step * direction for direction in directions.values()], start)
        before_line = self.error
        slopes = torch.tensor(rises, dtype=torch.float64) - began
        slopes /= slopes.abs().max().clamp(min=torch.finfo(slopes.dtype).tiny)
        # Its largest coefficient is 1.
        descent = (-slopes[:, None] * torch.stack(list(directions.values()))).sum(dim=0)
        line = self.try_out([base + step * length * descent for length in LENGTHS], start)
        best = line.index(min(line))
        factor = list(LENGTHS.values())[best] if line[best] < before_line else NOTHING_FOUND
        self.steps[self.rounds % 2] = max(LAST_STEP, factor * step)
        stage = {"stage": f"round {len(self.stages)}", "began": began, "step": step}
        self.stages.append(stage | {"probes": dict(zip(directions, rises)), "line": line, "ended": self.error})
        self.rounds += 1

    def try_out(self, candidates: Sequence[torch.Tensor], stream_of: Plan | None = None) -> list[float]:
        """Return errors of candidates. The best replaces the best so far if its error is lower."""
        moved = [self.space.on_target(candidate) for candidate in candidates]
        plans = [self.space.plan(sparsities) for sparsities in moved]
        errors = self.measure(plans, stream_of, self.space.cost(moved))
        first = errors.index(min(errors))
        if errors[first] < self.error:
            self.best, self.best_plan, self.error = moved[first], plans[first], errors[first]
        return errors

    def spread_rows(self) -> None:
        self.restart()
        saliency = self.evaluator.measure(RowSaliency(), [self.best_plan])
        sparsities = dict(zip(self.space.names, self.best.tolist()))
        plans = [
            Plan({name: get_dist(sparsities[name], width, saliency[name]) for name in self.space.names})
            for width in ROW_WIDTHS
        ]
        began, errors = self.error, self.measure(plans, self.best_plan, len(plans))
        if min(errors) < began:
            self.best_plan = plans[errors.index(min(errors))]
        self.stages.append({"stage": "rows", "began": began, "errors": dict(zip(map(str, ROW_WIDTHS), errors))})


@dataclass(frozen=True)
class Space:
    """Sparsities and directions with one float64 entry per projection."""

    names: list[str]
    sizes: torch.Tensor  # numbers of weights
    blocks: torch.Tensor  # int64: number of the block, among the blocks with pruned projections
    depth: torch.Tensor  # position of the block, from -1 (first) to 1 (last); 0 if there is only one
    kinds: dict[str, torch.Tensor]  # kind -> 1 for the projections of this kind, else 0
    target: float  # mean sparsity of all weights

    @classmethod
    def of(cls, decoder: Decoder, target: float) -> "Space":
        pruned = [block.pruned for block in decoder.blocks if block.pruned]
        projections = [projection for block in pruned for projection in block]
        blocks = torch.tensor([index for index, block in enumerate(pruned) for _ in block])
        depth = 2 * blocks.double() / max(1, len(pruned) - 1) - float(len(pruned) > 1)
        by_projection = [kind_moved(projection) for projection in projections]
        kinds = {
            kind: torch.tensor([other == kind for other in by_projection]).double()
            for kind in dict.fromkeys(by_projection)
        }
        sizes = torch.tensor([projection.numel for projection in projections], dtype=torch.float64)
        return cls([projection.name for projection in projections], sizes, blocks, depth, kinds, target)

    @property
    def uniform(self) -> torch.Tensor:
        return torch.full_like(self.sizes, self.target)

    def directions(self, number: int) -> dict[str, torch.Tensor]:
        """Return the directions that round `number` (from 0) probes, name -> direction of weighted mean 0.

        Candidates along directions of the late half of the blocks share the early half.
        """
        everywhere = torch.ones_like(self.depth)
        directions = {kind: self._centered(mask, everywhere) for kind, mask in self.kinds.items()}
        if number % 2 and self.depth.any():
            late = (self.depth > 0).double()
            shapes = {
                "depth": self.depth,
                "curvature over depth": self.depth**2,
                "first block": (self.depth == -1).double(),
                "last block": (self.depth == 1).double(),
            }
            directions = {f"{kind}, late": self._centered(mask * late, late) for kind, mask in self.kinds.items()}
            directions |= {name: self._centered(shape, everywhere) for name, shape in shapes.items()}
        return {name: direction for name, direction in directions.items() if direction.abs().max() > NEGLIGIBLE}

    def _centered(self, direction: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Subtract the weighted mean in the part of the model where `where` is 1 and not 0."""
        weights = self.sizes * where
        return direction - where * (direction * weights).sum() / weights.sum()

    def cost(self, candidates: Sequence[torch.Tensor]) -> float:
        """Return the passes of candidates, shape (projections,) each; they share blocks up to a difference."""
        rows, count = torch.stack(list(candidates)), int(self.blocks.max()) + 1
        distinct = [{row.numpy().tobytes() for row in rows[:, self.blocks <= index]} for index in range(count)]
        return sum(map(len, distinct)) / count

    def on_target(self, sparsities: torch.Tensor) -> torch.Tensor:
        """Shift all sparsities by one amount, clipped to [0.01, 0.99], so that their weighted mean is the target."""
        mean = (sparsities * self.sizes).sum() / self.sizes.sum()
        within = sparsities.min() >= LEAST_SPARSITY and sparsities.max() <= MOST_SPARSITY
        if within and abs(mean - self.target) < NEGLIGIBLE:
            return sparsities  # the same bit for bit, so that candidates share equal blocks
        return shift_to_mean(sparsities, self.target, self.sizes)

    def plan(self, sparsities: torch.Tensor) -> Plan:
        return Plan(dict(zip(self.names, sparsities.tolist())))


def kind_moved(projection: Projection) -> str:
    """Return the kind of projections that move together: its role or name, with queries and keys as one kind."""
    role = projection.name.rpartition(".")[2] if projection.role in (None, "mixer") else projection.role
    role = "query and key" if role in ("query", "key") else role
    return role if projection.expert is None else f"experts' {role}"
