"""Search: where the sparsity goes, by a zeroth-order search over blocks, kinds of projections, and rows."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..masks import SparsityPlan
from ..output_errors import OUTPUT_METRICS
from ..projections import Decoder, Projection
from ..registry import did_you_mean
from ..sweep import Sweep
from .base import LARGEST, SMALLEST, Allocation, Pass, TopUp, get_dist, register_topup, shift_to_mean
from .hyper_parameters import check_number, check_whole


LABEL = "Search"
STEPS = (0.06, 0.06, 0.04, 0.04, 0.03, 0.03, 0.02)  # how far the probes of a round go; the last one for all later
LENGTHS = (0.6, 1.2, 2.1)  # how far the candidates of a round's line go, in steps
BLOCK_WIDTHS = (0.05, 0.1, 0.2)
ROW_WIDTHS = (0.05, 0.1)  # wider ones gain on the calibration sequences and lose on others
STREAM_COST = 2  # a plan's own stream: every block dense, then sparse


@register_topup("search")
@dataclass(frozen=True)
class Search(TopUp):
    """Goes beyond NeuronAL within its frame: candidates, forwards of a few sequences, no gradients, no training.

    1. *Blocks*: sparsity rises linearly with depth; of a few slopes the best one is kept.
    2. *Rounds*: every direction is probed with one candidate: a kind of projections gets more sparsity, all others
       less (odd rounds), or it gets more in late blocks and less in early ones (even rounds, with the curvature over
       depth and the outermost blocks). The probes tell a slope for every direction; three candidates on the line of
       steepest descent are tried, and the best of all is kept if it is better than the plan so far.
    3. *Rows*: rows with little saliency in all get more sparsity than others of their projection.

    A candidate's error is how far its next-token distributions are from the dense model's on the alignment sequences.
    Its saliency is measured on the stream of the plan that the round began with: nearly as good as measuring it for
    every candidate, at half the cost. A saliency that updates weights is searched for by its score alone and has no
    third stage. All is deterministic; docs/search.md tells what was tried.

    Args:
        budget (`int`):
            How many times the alignment sequences may pass through the model. The default is what NeuronAL's two steps
            take: 29 candidates, each run dense and sparse.
        objective (`str`): `"kl"`, from the dense model's distributions, or `"nll"`, of the text.
        rows (`bool`): whether to take the third stage.
        widths (`tuple[float, ...]`): half-widths of the block stage's sparsity windows, in [0, 1].
    """

    rows_are_optional: ClassVar[bool] = True

    budget: int = 58
    objective: str = "kl"
    rows: bool = True
    widths: tuple[float, ...] = BLOCK_WIDTHS

    def __post_init__(self):
        check_whole("budget", self.budget, 8)
        if self.objective not in OUTPUT_METRICS:
            known = ", ".join(map(repr, OUTPUT_METRICS))
            hint = did_you_mean(self.objective, list(OUTPUT_METRICS))
            raise ValueError(f"objective is {self.objective!r}: expected one of {known}.{hint}")
        if not isinstance(self.rows, bool):
            raise ValueError(f"rows is {self.rows!r}: expected True or False.")
        if not self.widths:
            raise ValueError("widths is empty: expected at least one number from 0 to 1.")
        for width in self.widths:
            check_number("widths", width, 0, 1)
        object.__setattr__(self, "widths", tuple(map(float, self.widths)))

    @property
    def by_row(self) -> bool:
        return self.rows

    def passes(self) -> tuple[Pass, ...]:
        together = 16  # about as many candidates as a round has
        return (Pass(LABEL, together, measures="output", times=-(-self.budget // together)),)

    def allocate(self, sweep: Sweep, sparsity: float) -> Allocation:
        start = time.perf_counter()
        space = Space.of(sweep.decoder, sparsity)
        run = _Run(sweep, space, self.objective, self.budget - 1)  # one: the dense model
        if not SMALLEST < sparsity < LARGEST or len(space.sizes) == 1:  # nothing can be moved
            return Allocation(space.plan(space.uniform))
        run.begin([space.uniform + width * space.depth for width in self.widths])
        rows = len(ROW_WIDTHS) + STREAM_COST if self.rows and not sweep.saliency.updates_weights else 0
        while space.directions(run.rounds) and run.can_afford(space.cost_of_round(run.rounds) + rows):
            run.take_round()
        if rows and run.can_afford(rows):
            run.spread_rows()
        seconds = time.perf_counter() - start
        return Allocation(
            run.best_plan, {"search": {"stages": run.stages, "spent": run.spent + 1, "seconds": seconds}}
        )


@dataclass(frozen=True)
class Space:
    """Sparsities by projection that hit the target, and the directions to move them in.

    All tensors are float64 with one entry per projection.

    Args:
        names (`list[str]`): of the projections.
        sizes (`Tensor`): weights of each.
        depth (`Tensor`): where its block lies, from -1 (first) to 1 (last); 0 if there is only one.
        kinds (`dict[str, Tensor]`): kind of projection -> 1 for those of it, else 0.
        target (`float`): mean sparsity of all weights.
    """

    names: list[str]
    sizes: torch.Tensor
    depth: torch.Tensor
    kinds: dict[str, torch.Tensor]
    target: float

    @classmethod
    def of(cls, decoder: Decoder, target: float) -> "Space":
        blocks = [block for block in decoder.blocks if block.pruned]
        found = [(index, projection) for index, block in enumerate(blocks) for projection in block.pruned]
        last = max(1, len(blocks) - 1)
        depth = torch.tensor([2 * index / last - 1 if len(blocks) > 1 else 0.0 for index, _ in found])
        kinds: dict[str, list[int]] = {}
        for position, (_, projection) in enumerate(found):
            kinds.setdefault(kind_of(projection), []).append(position)
        masks = {}
        for kind, positions in kinds.items():
            masks[kind] = torch.zeros(len(found), dtype=torch.float64)
            masks[kind][positions] = 1
        sizes = torch.tensor([math.prod(projection.shape) for _, projection in found], dtype=torch.float64)
        return cls([projection.name for _, projection in found], sizes, depth.double(), masks, target)

    @property
    def uniform(self) -> torch.Tensor:
        """The target everywhere."""
        return torch.full_like(self.sizes, self.target)

    def directions(self, number: int) -> dict[str, torch.Tensor]:
        """What the round of a number probes, name -> direction; those that move nothing are left out."""
        found = dict(self.kinds)
        if number % 2 and self.depth.any():
            found = {f"{kind}, by depth": mask * self.depth for kind, mask in self.kinds.items()}
            found |= {"curvature over depth": self.depth**2}
            found |= {"first block": (self.depth == -1).double(), "last block": (self.depth == 1).double()}
        return {name: direction for name, direction in found.items() if direction.min() < direction.max()}

    def cost_of_round(self, number: int) -> int:
        """Passes of the alignment sequences that a round takes."""
        return STREAM_COST + len(self.directions(number)) + len(LENGTHS)

    def on_target(self, sparsities: torch.Tensor) -> torch.Tensor:
        """Shifts all sparsities alike, clipped to [0.01, 0.99], so that their weighted mean is the target."""
        return shift_to_mean(sparsities, self.target, self.sizes)

    def plan(self, sparsities: torch.Tensor) -> SparsityPlan:
        """The plan of these sparsities."""
        return SparsityPlan(dict(zip(self.names, sparsities.tolist())))


def kind_of(projection: Projection) -> str:
    """What projections have in common that are moved together: their role; queries and keys are of one kind."""
    role = projection.role or projection.name.rpartition(".")[2]
    role = "query and key" if role in ("query", "key") else role
    return role if projection.expert is None else f"experts' {role}"


@dataclass
class _Run:
    """A search under way: the best sparsities so far, their error, and what was spent."""

    sweep: Sweep
    space: Space
    objective: str
    budget: int
    spent: int = 0
    rounds: int = 0
    error: float = math.inf
    best: torch.Tensor | None = None
    best_plan: SparsityPlan | None = None
    stages: list[dict] = field(default_factory=list)

    def can_afford(self, cost: int) -> bool:
        return self.spent + cost <= self.budget

    def measure(self, plans: Sequence[SparsityPlan], reference) -> list[float]:
        self.spent += len(plans)
        return self.sweep.output_errors(plans, self.objective, LABEL, reference)

    def begin(self, candidates: Sequence[torch.Tensor]) -> None:
        """The first stage: the best of a few, with the dense model's saliency."""
        moved = [self.space.on_target(candidate) for candidate in candidates]
        plans = [self.space.plan(sparsities) for sparsities in moved]
        errors = self.measure(plans, "dense")
        first = min(range(len(errors)), key=errors.__getitem__)
        self.best, self.best_plan, self.error = moved[first], plans[first], errors[first]
        self.stages.append({"stage": "blocks", "errors": errors, "chosen": first})

    def restart(self) -> None:
        """The error of the best plan with saliency from its own stream, which its rivals are measured with too."""
        self.spent += STREAM_COST - 1
        (self.error,) = self.measure([self.best_plan], self.best_plan)

    def take_round(self) -> None:
        """Probes every direction, then tries the line of steepest descent."""
        self.restart()
        directions = self.space.directions(self.rounds)
        step = STEPS[min(self.rounds, len(STEPS) - 1)]
        probes = [self.best + step * direction for direction in directions.values()]
        began, base, start = self.error, self.best, self.best_plan
        rises = self.try_out(probes, start)
        descent = _descent(torch.tensor(rises, dtype=torch.float64) - began, torch.stack(list(directions.values())))
        line = self.try_out([base + step * length * descent for length in LENGTHS], start)
        self.stages.append(
            {
                "stage": f"round {self.rounds + 1}",
                "began": began,
                "probes": dict(zip(directions, rises)),
                "line": line,
                "ended": self.error,
            }
        )
        self.rounds += 1

    def try_out(self, candidates: Sequence[torch.Tensor], reference: SparsityPlan) -> list[float]:
        """Errors of candidates; the best of them becomes the best so far, if it is."""
        moved = [self.space.on_target(candidate) for candidate in candidates]
        plans = [self.space.plan(sparsities) for sparsities in moved]
        errors = self.measure(plans, reference)
        first = min(range(len(errors)), key=errors.__getitem__)
        if errors[first] < self.error:
            self.best, self.best_plan, self.error = moved[first], plans[first], errors[first]
        return errors

    def spread_rows(self) -> None:
        """The third stage."""
        self.restart()
        saliency = self.sweep.row_saliency(self.best_plan, LABEL)
        sparsities = dict(zip(self.space.names, self.best.tolist()))
        plans = [
            SparsityPlan({name: get_dist(sparsities[name], width, saliency[name]) for name in self.space.names})
            for width in ROW_WIDTHS
        ]
        began, errors = self.error, self.measure(plans, self.best_plan)
        first = min(range(len(errors)), key=errors.__getitem__)
        if errors[first] < self.error:
            self.best_plan, self.error = plans[first], errors[first]
        self.stages.append({"stage": "rows", "began": began, "errors": dict(zip(map(str, ROW_WIDTHS), errors))})


def _descent(rises: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """The direction of steepest descent, its largest coefficient being 1, from the errors' rises along directions."""
    largest = rises.abs().max()
    return torch.zeros_like(directions[0]) if largest == 0 else (-(rises / largest)[:, None] * directions).sum(dim=0)
