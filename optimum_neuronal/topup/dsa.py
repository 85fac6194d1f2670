"""DSA: searches the function that makes sparsities by block of the statistics of its weights' saliency."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..engine.passes import Pass
from ..trials.output_errors import OutputPass
from ..trials.sweep import ScoresPass, Sweep
from ..validation import check_count, check_number, check_numbers
from .base import Allocation, TopUp, register_topup
from .by_block import plan_of_blocks, pruned_blocks
from .choosing import draw
from .dsa_functions import LABEL, MOST_TRANSFORMS, PRE, REDUCE, TRANSFORM, Function, block_statistics


SEARCH = "DSA"
METRIC = "nll"  # what candidates are compared by
ATTEMPTS = 50  # draws per wanted function before fewer than wanted are taken


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

    compares_outputs: ClassVar[bool] = True

    population: int = 10
    generations: int = 6
    offspring: int = 8
    mutation: float = 0.3
    lambdas: tuple[float, ...] = (0.07, 0.08, 0.09, 0.10)
    search_seed: int = 0

    def __post_init__(self):
        for name, least in (("population", 1), ("generations", 0), ("offspring", 1), ("search_seed", 0)):
            check_count(name, getattr(self, name), least)
        check_number("mutation", self.mutation, 0, 1)
        object.__setattr__(self, "lambdas", check_numbers("lambdas", self.lambdas, 0, 1))

    def passes(self) -> tuple[Pass, ...]:
        generations = OutputPass(SEARCH, self.offspring, times=self.generations, metric=METRIC)
        searched = (OutputPass(SEARCH, self.population, metric=METRIC), *[generations] * (self.generations > 0))
        return ScoresPass(LABEL, 0), *searched

    def allocate(self, sweep: Sweep, sparsity: float) -> Allocation:
        start = time.perf_counter()
        statistics, blocks = block_statistics(sweep), pruned_blocks(sweep.decoder)
        generator = torch.Generator().manual_seed(self.search_seed)
        errors: dict[Function, float] = {}  # of all functions so far
        tried: set[tuple[float, ...]] = set()

        def measure(make: Callable[[], Function], count: int) -> None:
            functions = _different(
                make, count, lambda function: function.sparsities(sweep.decoder, sparsity, statistics), tried
            )
            plans = [
                plan_of_blocks(blocks, torch.tensor(shares, dtype=torch.float64)) for shares in functions.values()
            ]
            errors.update(zip(functions, sweep.output_errors(plans, METRIC, label=SEARCH, reference="dense")))

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
        shares = torch.tensor(best.sparsities(sweep.decoder, sparsity, statistics), dtype=torch.float64)
        return Allocation(plan_of_blocks(blocks, shares), {"dsa": decision})

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
