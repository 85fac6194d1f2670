"""DSA: searches the function that makes sparsities by block of the statistics of its weights' saliency."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..decoder.projections import Block, Decoder
from ..engine.sweep import Sweep
from ..metrics.statistics import wide_dtype
from ..runtime.choosing import draw
from ..runtime.hyper_parameters import check_number, check_whole
from ..sparsity.plan import SparsityPlan
from .base import Allocation, Pass, TopUp, get_dist, register_topup


STATISTICS, SEARCH = "DSA statistics", "DSA"
ATTEMPTS = 50  # draws per wanted function before fewer than wanted are taken


@dataclass(frozen=True)
class Moments:
    """What a reduction may know of a block's elements x: how many, and sums over them; float64.

    Args:
        count (`int`): number of elements.
        total, squares, absolute, logs (`float`): sums of x, x^2, |x| and log |x|.
        positive, positive_logs (`float`): sums of x and of x log x over the elements above zero.
        least, most (`float`): the extremes.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    absolute: float = 0.0
    logs: float = 0.0
    positive: float = 0.0
    positive_logs: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @classmethod
    def of(cls, elements: torch.Tensor) -> "Moments":
        """Moments of a tensor of any shape; sums are taken in the widest type of its device."""
        wide = wide_dtype(elements.device)
        absolute, positive = elements.abs(), elements.clamp(min=0)
        sums = (
            elements.sum(dtype=wide),
            elements.square().sum(dtype=wide),
            absolute.sum(dtype=wide),
            absolute.log().sum(dtype=wide),
            positive.sum(dtype=wide),
            torch.special.xlogy(positive, positive).sum(dtype=wide),
            elements.min().to(wide),
            elements.max().to(wide),
        )
        return cls(elements.numel(), *torch.stack(sums).tolist())

    def __add__(self, other: "Moments") -> "Moments":
        sums = (
            getattr(self, name) + getattr(other, name)
            for name in ("count", "total", "squares", "absolute", "logs", "positive", "positive_logs")
        )
        return Moments(*sums, min(self.least, other.least), max(self.most, other.most))

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        return max(self.squares - self.total * self.mean, 0.0) / max(self.count - 1, 1)


# The authors' tables (lib/autolayer.py of their repository). Element by element: an element and its block's moments.
PRE: dict[str, Callable[[torch.Tensor, Moments], torch.Tensor]] = {
    "no_op": lambda x, block: x,
    "abs": lambda x, block: x.abs(),
    "log": lambda x, block: torch.where(x <= 0, 1, x).add(1e-6).log(),
    "abslog": lambda x, block: torch.where(x == 0, 1, x.abs()).log(),
    "pow": lambda x, block: x.square(),
    "exp": lambda x, block: x.exp(),
    "normalize": lambda x, block: (x - block.mean) / max(math.sqrt(block.variance), 1e-30),
    "sigmoid": lambda x, block: x.sigmoid(),
    "tanh": lambda x, block: x.tanh(),
    "mms": lambda x, block: (x - block.least) / (block.most - block.least + 1e-9),
}

# A block's elements -> its importance.
REDUCE: dict[str, Callable[[Moments], float]] = {
    "mean": lambda m: m.mean,
    "var": lambda m: m.variance,
    "std": lambda m: math.sqrt(m.variance),
    "l1_norm": lambda m: m.absolute / m.count,
    "frobenius_norm": lambda m: math.sqrt(m.squares),
    "geometric_mean": lambda m: math.exp(m.logs / m.count) if m.logs / m.count < 700 else math.inf,
    # Of the elements above zero as probabilities p = x / sum x: - sum p log p.
    "entropy": lambda m: math.log(m.positive) - m.positive_logs / m.positive if m.positive > 0 else math.nan,
}

# Importances of all blocks, float64, shape (blocks,) -> the same shape.
TRANSFORM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no_op": lambda v: v,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "exp": torch.exp,
    "log": torch.log,
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": torch.nn.functional.softplus,
}

MOST_TRANSFORMS = 2
Statistics = dict[tuple[str, str], torch.Tensor]  # (pre, reduce) -> importances, float64, shape (blocks,)


@dataclass(frozen=True)
class Function:
    """An allocation function: the names of its operations in their order, and half the width of its window."""

    pre: str
    reduce: str
    transforms: tuple[str, ...]
    lam: float

    def __str__(self) -> str:
        """As the authors write it: `"W:(ABSLOG)-(VAR)-(ATAN,ASIN)-(7)"`."""
        parts = (self.pre, self.reduce, ",".join(self.transforms))
        return f"W:({')-('.join(part.upper() for part in parts)})-({self.lam * 100:g})"

    def sparsities(self, decoder: Decoder, sparsity: float, statistics: Statistics) -> tuple[float, ...] | None:
        """One per block that has something to prune, in their order; None if some importances are infinite.

        Importances scaled to [0, 1] and turned around, times `2 * lam`, are densities, shifted to their mean.
        """
        importances = self.importances(statistics)
        if importances is None:
            return None
        sizes = torch.tensor([sum(math.prod(p.shape) for p in block.pruned) for block in _blocks(decoder)])
        return tuple(get_dist(sparsity, self.lam, -importances, sizes).tolist())

    def importances(self, statistics: Statistics) -> torch.Tensor | None:
        """One value per block, float64; None if some are infinite. What is no number counts as zero (the authors')."""
        values = statistics[self.pre, self.reduce]
        for name in self.transforms:
            values = TRANSFORM[name](values)
        values = torch.where(values.isnan(), 0, values)
        return values if bool(values.isfinite().all()) else None


@register_topup("dsa")
@dataclass(frozen=True)
class DSA(TopUp):
    """Evolutionary search of an allocation function (Li et al., Discovering Sparsity Allocation for Layer-wise Pruning
    of Large Language Models, NeurIPS 2024, Algorithm 1; operations and ranges as in the authors' repository).

    A function takes Wanda's metric `|W_ij| a_j` of all weights of a block, changes it element by element (`PRE`),
    reduces it to one importance (`REDUCE`), and transforms that once or twice (`TRANSFORM`). Scaled to [0, 1] over the
    blocks and turned around, importances are the blocks' densities within a window of `2 * lam`, the mean being kept:
    blocks of large importance are pruned more, unless a transform falls. A population of functions is ranked by the
    perplexity of the sparse model on the alignment sequences. Each generation adds offspring, by crossover of two of
    the better half and by mutation, and drops the worst.

    The defaults cost as many evaluations as NeuronAL has candidates twice over: 10 + 6 x 8 = 58 plans. The authors
    search for half a day on one accelerator, by the perplexity on Wikitext2; their code holds what a function is made
    of, but not that search, so its population, generations and probabilities are ours. Where their code takes up to
    two element-wise operations, one is taken here, since all statistics come from one pass over the calibration
    sequences. Their reductions of matrices (Gram, rank, determinant, ...) are left out: their code passes them a
    vector, on which they fail. Functions whose plans have been tried already are drawn again.

    Args:
        population (`int`): functions that are kept from one generation to the next.
        generations (`int`): how often offspring are made.
        offspring (`int`): functions per generation.
        mutation (`float`): probability that an operation of an offspring is drawn anew.
        lambdas (`tuple[float, ...]`): half-widths of the window that a function may have.
        search_seed (`int`): seed of the search; has nothing to do with the draw of calibration sequences.
    """

    population: int = 10
    generations: int = 6
    offspring: int = 8
    mutation: float = 0.3
    lambdas: tuple[float, ...] = (0.07, 0.08, 0.09, 0.10)
    search_seed: int = 0

    def __post_init__(self):
        for name, least in (("population", 1), ("generations", 0), ("offspring", 1), ("search_seed", 0)):
            check_whole(name, getattr(self, name), least)
        check_number("mutation", self.mutation, 0, 1)
        if isinstance(self.lambdas, str) or not isinstance(self.lambdas, Sequence) or not self.lambdas:
            raise ValueError(f"lambdas is {self.lambdas!r}: expected numbers, such as (0.08,).")
        for lam in self.lambdas:
            check_number("lambdas", lam, 0, 1)
        object.__setattr__(self, "lambdas", tuple(self.lambdas))

    def passes(self) -> tuple[Pass, ...]:
        generations = Pass(SEARCH, self.offspring, "dense", "output", times=self.generations)
        searched = (Pass(SEARCH, self.population, "dense", "output"), *[generations] * (self.generations > 0))
        return Pass(STATISTICS, 0, "dense", "scores"), *searched

    def allocate(self, sweep: Sweep, sparsity: float) -> Allocation:
        start = time.perf_counter()
        statistics = block_statistics(sweep)
        generator = torch.Generator().manual_seed(self.search_seed)
        errors: dict[Function, float] = {}  # of all functions so far
        tried: set[tuple[float, ...]] = set()

        def measure(make: Callable[[], Function], count: int) -> None:
            functions = _different(
                make, count, lambda function: function.sparsities(sweep.decoder, sparsity, statistics), tried
            )
            plans = [plan_of(sweep.decoder, shares) for shares in functions.values()]
            errors.update(zip(functions, sweep.output_errors(plans, "nll", label=SEARCH, reference="dense")))

        measure(lambda: self._random(generator), self.population)
        for _ in range(self.generations):
            kept = sorted(errors, key=errors.__getitem__)[: self.population]
            parents = kept[: max(2, -(-len(kept) // 2))]
            measure(lambda parents=parents: self._child(generator, parents), self.offspring)
        best = min(errors, key=errors.__getitem__)
        decision = {
            "function": str(best),
            "candidates": [{"function": str(function), "error": error} for function, error in errors.items()],
            "seconds": time.perf_counter() - start,
        }
        return Allocation(
            plan_of(sweep.decoder, best.sparsities(sweep.decoder, sparsity, statistics)), {"dsa": decision}
        )

    def _random(self, generator: torch.Generator) -> Function:
        def one(names) -> str:
            return list(names)[draw(generator, len(names))]

        transforms = tuple(one(TRANSFORM) for _ in range(1 + draw(generator, MOST_TRANSFORMS)))
        return Function(one(PRE), one(REDUCE), transforms, one(self.lambdas))

    def _child(self, generator: torch.Generator, parents: Sequence[Function]) -> Function:
        """Takes each part from one of two parents, and draws it anew with the probability of a mutation."""
        mother, father = (parents[draw(generator, len(parents))] for _ in range(2))
        fresh = self._random(generator)
        parts = {}
        for name in ("pre", "reduce", "transforms", "lam"):
            mutates = float(torch.rand((), generator=generator)) < self.mutation
            parts[name] = getattr(fresh if mutates else (mother, father)[draw(generator, 2)], name)
        return Function(**parts)


def block_statistics(sweep: Sweep) -> Statistics:
    """Importance of every block by every pair of element-wise operation and reduction, of Wanda's metric."""
    found = [scores for scores in sweep.dense_scores(_scores, STATISTICS) if scores]
    pairs = [(pre, reduce) for pre in PRE for reduce in REDUCE]
    return {pair: torch.tensor(values, dtype=torch.float64) for pair, values in zip(pairs, zip(*found))}


def _scores(block: Block, activations: dict[str, torch.Tensor]) -> list[float]:
    """For every pair of operations; none if nothing of the block is pruned."""
    if not block.pruned:
        return []

    def metrics():
        for projection in block.pruned:
            yield projection.weight.float().abs() * activations[projection.name]

    whole = sum((Moments.of(metric) for metric in metrics()), Moments())
    moments = dict.fromkeys(PRE, Moments())
    for metric in metrics():  # made again rather than kept: a block's metrics take twice the room of its weights
        for name, operation in PRE.items():
            moments[name] += Moments.of(operation(metric, whole))
    return [reduce(moments[name]) for name in PRE for reduce in REDUCE.values()]


def _different(
    make: Callable[[], Function],
    count: int,
    sparsities: Callable[[Function], tuple[float, ...] | None],
    tried: set[tuple[float, ...]],
) -> dict[Function, tuple[float, ...]]:
    """So many functions, or fewer where they are hard to find, whose sparsities are valid and have not been tried."""
    found: dict[Function, tuple[float, ...]] = {}
    for _ in range(ATTEMPTS * count):
        function = make()
        shares = sparsities(function)
        if shares is not None and shares not in tried:
            found[function] = shares
            tried.add(shares)
        if len(found) == count:
            break
    return found


def plan_of(decoder: Decoder, shares: Sequence[float]) -> SparsityPlan:
    """The plan that gives every block with something to prune its sparsity."""
    return SparsityPlan({name: share for block, share in zip(_blocks(decoder), shares) for name in block.pruned_names})


def _blocks(decoder: Decoder) -> list[Block]:
    return [block for block in decoder.blocks if block.pruned]
