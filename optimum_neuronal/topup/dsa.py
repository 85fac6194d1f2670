"""DSA: search of a function from statistics of a block's saliency to its sparsity."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch

from ..blocks.statistics import wide_dtype
from ..common.validation import hyper
from ..model.projections import Block
from ..saliency.plan import Plan
from ..trials import PlanEvaluator
from ..trials.output_errors import OutputErrors
from ..trials.scores import BlockScores
from .base import Allocation, TopUp, register_topup
from .distribution import distribute_over_blocks, wanda_metric
from .evopress import distinct, draw


MOST_TRANSFORMS = 2
DRAWS_PER_FUNCTION = 50  # before it settles for fewer functions


class ElementSums(NamedTuple):
    """Sums over a block's elements x: of x, x^2, |x| and log |x|; of x and x log x above zero; and the extremes."""

    count: int
    total: float
    squares: float
    absolute: float
    logs: float
    positive: float
    positive_logs: float
    least: float
    most: float

    @classmethod
    def of(cls, elements: torch.Tensor) -> "ElementSums":
        wide = wide_dtype(elements.device)
        absolute, positive = elements.abs(), elements.clamp(min=0)
        sums = [elements.sum(dtype=wide), elements.square().sum(dtype=wide)]
        sums += [absolute.sum(dtype=wide), absolute.log().sum(dtype=wide)]
        sums += [positive.sum(dtype=wide), torch.special.xlogy(positive, positive).sum(dtype=wide)]
        sums += [elements.min().to(wide), elements.max().to(wide)]
        return cls(elements.numel(), *torch.stack(sums).tolist())

    @classmethod
    def joined(cls, parts: Iterable["ElementSums"]) -> "ElementSums":
        """Return the sums over the elements of all parts, such as the projections of a block."""
        *sums, leasts, mosts = zip(*parts)
        return cls(*map(sum, sums), min(leasts), max(mosts))

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Unbiased variance of the elements."""
        return max(self.squares - self.total * self.mean, 0.0) / max(self.count - 1, 1)


# The authors' tables (lib/autolayer.py of their repository). An element and its block's sums -> the element changed.
PRE: dict[str, Callable[[torch.Tensor, ElementSums], torch.Tensor]] = {
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
REDUCE: dict[str, Callable[[ElementSums], float]] = {
    "mean": lambda m: m.mean,
    "var": lambda m: m.variance,
    "std": lambda m: math.sqrt(m.variance),
    "l1_norm": lambda m: m.absolute / m.count,
    "frobenius_norm": lambda m: math.sqrt(m.squares),
    "geometric_mean": lambda m: math.exp(m.logs / m.count) if m.logs / m.count < 700 else math.inf,
    # - sum p log p of the elements above zero, as probabilities p = x / sum x.
    "entropy": lambda m: math.log(m.positive) - m.positive_logs / m.positive if m.positive > 0 else math.nan,
}

# Importances of all blocks, float64, shape (blocks,) -> the same shape.
TRANSFORM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no_op": lambda v: v,
    **{name: getattr(torch, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan")},
    **{name: getattr(torch, name) for name in ("exp", "log", "abs", "sigmoid", "tanh")},
    "softplus": torch.nn.functional.softplus,
}

Statistics = dict[tuple[str, str], torch.Tensor]  # (pre, reduce) -> importances, float64, shape (blocks,)


@dataclass(frozen=True)
class Function:
    """An allocation function: the names of its operations in order, and half the width of its window."""

    pre: str
    reduce: str
    transforms: tuple[str, ...]
    lam: float

    def __str__(self) -> str:
        """Return the authors' notation, such as `"W:(ABSLOG)-(VAR)-(ATAN,ASIN)-(7)"`."""
        parts = f"({self.pre})-({self.reduce})-({','.join(self.transforms)})"
        return f"W:{parts.upper()}-({self.lam * 100:g})"

    def importances(self, statistics: Statistics) -> torch.Tensor:
        """Return one float64 per block. NaN counts as zero, as in the authors' code."""
        values = statistics[self.pre, self.reduce]
        for name in self.transforms:
            values = TRANSFORM[name](values)
        return torch.where(values.isnan(), 0, values)


@register_topup("dsa")
@dataclass(frozen=True)
class DSA(TopUp):
    """Evolutionary search of an allocation function.

    Li et al., Discovering Sparsity Allocation for Layer-wise Pruning of Large Language Models, NeurIPS 2024, Algorithm 1;
    operations and ranges as in the authors' repository.

    A function changes Wanda's metric of a block's weights element by element (`PRE`), reduces it to one importance
    (`REDUCE`), and transforms that once or twice (`TRANSFORM`). Importances decide sparsity linearly within a window of
    `2 * lam`: important blocks are pruned more. Each generation adds offspring, by crossover of two functions of the
    better half and by mutation, and drops the worst. Functions whose plans were already tried are drawn again.

    The authors' code applies up to two element-wise operations; with one, a single pass gives all statistics.

    Args:
        population (`int`): functions that are kept from one generation to the next.
        generations (`int`): how often offspring are made.
        offspring (`int`): functions per generation.
        mutation (`float`): probability that an operation of an offspring is drawn anew.
        lambdas (`tuple[float, ...]`): half-widths of the window that a function may have.
        search_seed (`int`): seed of the search, independent of the draw of calibration sequences.
    """

    paper: ClassVar[str] = (
        "Li et al., Discovering Sparsity Allocation for Layer-wise Pruning of Large Language Models, NeurIPS 2024"
    )
    compares_outputs: ClassVar[bool] = True

    population: int = hyper(10, 1)
    generations: int = hyper(6, 0)
    offspring: int = hyper(8, 1)
    mutation: float = hyper(0.3, 0, 1)
    lambdas: tuple[float, ...] = hyper((0.07, 0.08, 0.09, 0.10), 0, 1)
    search_seed: int = hyper(0, 0)

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        statistics, generator = block_statistics(evaluator), torch.Generator().manual_seed(self.search_seed)
        plans: dict[Function, Plan] = {}  # of all functions so far
        errors: dict[Function, float] = {}

        def measure(make: Callable[[], Function], count: int) -> None:
            def untried() -> Function | None:
                function = make()
                plan = self.plan(evaluator, sparsity, function, statistics)
                if plan is None or plan in plans.values():
                    return None
                plans[function] = plan
                return function

            functions = distinct(untried, count, DRAWS_PER_FUNCTION * count)
            candidates = [plans[function] for function in functions]
            label = "comparing allocation functions (DSA)"
            errors.update(zip(functions, evaluator.measure(OutputErrors("nll", label), candidates)))

        measure(lambda: self._random(generator), self.population)
        for _ in range(self.generations):
            kept = sorted(errors, key=errors.__getitem__)[: self.population]
            parents = kept[: max(2, -(-len(kept) // 2))]
            measure(lambda parents=parents: self._child(generator, parents), self.offspring)
        best = min(errors, key=errors.__getitem__)
        candidates = [{"function": str(function), "error": error} for function, error in errors.items()]
        return Allocation(plans[best], {"dsa": {"function": str(best), "candidates": candidates}})

    def plan(
        self, evaluator: PlanEvaluator, sparsity: float, function: Function, statistics: Statistics
    ) -> Plan | None:
        """Return the plan of a function, or None if an importance is infinite."""
        values = -function.importances(statistics)
        if not bool(values.isfinite().all()):
            return None
        return distribute_over_blocks(evaluator.decoder, sparsity, function.lam, values)

    def _random(self, generator: torch.Generator) -> Function:
        def one(names) -> Any:
            return list(names)[draw(generator, len(names))]

        transforms = tuple(one(TRANSFORM) for _ in range(1 + draw(generator, MOST_TRANSFORMS)))
        return Function(one(PRE), one(REDUCE), transforms, one(self.lambdas))

    def _child(self, generator: torch.Generator, parents: Sequence[Function]) -> Function:
        """Return a function with each part from one of two parents, or drawn anew if it mutates."""
        mother, father = (parents[draw(generator, len(parents))] for _ in range(2))
        parts = []
        for fresh, *inherited in zip(*map(astuple, (self._random(generator), mother, father))):
            mutates = float(torch.rand((), generator=generator)) < self.mutation
            parts.append(fresh if mutates else inherited[draw(generator, 2)])
        return Function(*parts)


def block_statistics(evaluator: PlanEvaluator) -> Statistics:
    """Return the importance of every block by every pair of element-wise operation and reduction."""
    by_pair = zip(*evaluator.measure_once(BlockScores("measuring the importance of blocks (DSA)", _scores)))
    return {pair: torch.tensor(values, dtype=torch.float64) for pair, values in zip(product(PRE, REDUCE), by_pair)}


def _scores(block: Block, activations: dict[str, torch.Tensor]) -> list[float]:
    """Return the importances of a block by all pairs of operations."""
    whole = ElementSums.joined(ElementSums.of(wanda_metric(p, activations)) for p in block.pruned)
    parts = []
    for projection in block.pruned:  # again: a block's metrics take twice the memory of its weights
        metric = wanda_metric(projection, activations)
        parts.append([ElementSums.of(operation(metric, whole)) for operation in PRE.values()])
    return [reduce(sums) for sums in map(ElementSums.joined, zip(*parts)) for reduce in REDUCE.values()]
