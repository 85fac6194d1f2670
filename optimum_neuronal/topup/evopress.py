"""EvoPress: an evolutionary search that moves sparsity between blocks, judged by the whole model's output."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..engine.passes import Pass
from ..model.projections import Decoder, Projection
from ..sparsity.plan import SparsityPlan
from ..trials.output_errors import OutputPass
from ..trials.sweep import Sweep
from ..validation import check_choice, check_count, check_number, check_several
from .base import Allocation, TopUp, register_topup
from .by_block import pruned_blocks
from .choosing import draw, index_of_smallest


UNITS = ("block", "projection")
LABEL = "EvoPress"
SWITCHES = 3  # an offspring makes the smaller of two draws from 1 to so many, hence mostly one
ATTEMPTS = 20  # draws per wanted offspring before fewer than wanted are taken: small models have few neighbours

Levels = tuple[int, ...]


@register_topup("evopress")
@dataclass(frozen=True)
class EvoPress(TopUp):
    """(1 + lambda) search with level-switch mutation and multi-step selection (Sieberling et al., EvoPress: Accurate
    Dynamic Model Compression via Evolutionary Search, 2025, Algorithm 1).

    The search begins with uniform sparsity. An offspring raises the sparsity of some unit by a level and lowers that
    of another, one to three times. A level is the same number of weights in every unit, so the target stays. Offspring
    are compared by the KL divergence from the dense model's next-token distributions, first all of them on few
    alignment sequences, the survivors on more, and the last ones, and the parent, on all.

    The defaults cost what NeuronAL's do, 58 forwards over the 8 alignment sequences, or 464 over one: 14 generations
    of 8 x 2 + 2 x 8, and 8 for uniform sparsity. The authors' example searches 400 generations of 64 offspring, of
    which 8, 2 and 1 survive on 2,048, 16,384 and 65,536 tokens, drawn anew from half a million every time, so that the
    parent is measured again and again. Here the sequences stay, and its error is known. Their units are single
    projections, whose levels SparseGPT makes beforehand.

    Args:
        generations (`int`): how often the parent may be replaced.
        offspring (`int`): candidates per generation.
        survivors (`tuple[int, ...]`): how many candidates survive each step of a selection but the last, whose is 1.
        sequences (`tuple[int, ...]`):
            Alignment sequences that each of these steps measures on; the last step measures on all.
        unit (`str`): what has a level: `"block"`, or `"projection"` (the authors'), which takes longer to search.
        step (`float`):
            Size of a level: this share of `min(s, 1 - s)` times the weights of the smallest unit, s being the target.
            The authors': 1/16 of a square projection.
        levels (`int`): how many levels a unit may be above or below the target; `step * levels` is at most 1.
        search_seed (`int`): seed of the mutations; has nothing to do with the draw of calibration sequences.
    """

    compares_outputs: ClassVar[bool] = True

    generations: int = 14
    offspring: int = 8
    survivors: tuple[int, ...] = (2,)
    sequences: tuple[int, ...] = (2,)
    unit: str = "block"
    step: float = 0.0625
    levels: int = 8
    search_seed: int = 0

    def __post_init__(self):
        for name, least in (("generations", 0), ("offspring", 1), ("levels", 1), ("search_seed", 0)):
            check_count(name, getattr(self, name), least)
        for name in ("survivors", "sequences"):
            object.__setattr__(self, name, _checked_sizes(name, getattr(self, name)))
        if len(self.survivors) != len(self.sequences):
            raise ValueError(
                f"survivors is {self.survivors} and sequences is {self.sequences}: expected one number each for every "
                "step of the selection but the last."
            )
        if any(more > fewer for fewer, more in zip((self.offspring, *self.survivors), self.survivors)):
            raise ValueError(f"survivors is {self.survivors}: expected ever fewer of {self.offspring} offspring.")
        check_choice("unit", self.unit, UNITS)
        check_number("step", self.step, 0)
        if not 0 < self.step * self.levels <= 1:
            raise ValueError(
                f"step is {self.step!r} and levels is {self.levels}: expected a step above 0 with step * levels of at "
                "most 1, since sparsities would leave [0, 1] otherwise."
            )

    def passes(self) -> tuple[Pass, ...]:
        candidates = (self.offspring, *self.survivors)
        selection = [
            OutputPass(LABEL, count, sequences=sequences, times=self.generations)
            for count, sequences in zip(candidates, (*self.sequences, None))
            if self.generations
        ]
        return OutputPass(LABEL, 1), *selection

    def allocate(self, sweep: Sweep, sparsity: float) -> Allocation:
        start = time.perf_counter()
        units = units_of(sweep.decoder, self.unit)
        parent = (0,) * len(units)
        if len(units) < 2 or sparsity == 0:  # nothing to exchange
            return Allocation(self.plan(units, parent, sparsity))
        generator = torch.Generator().manual_seed(self.search_seed)
        (error,) = self._errors(sweep, units, [parent], sparsity, None)
        history = [error]
        for _ in range(self.generations):
            candidates = mutants(generator, parent, self.offspring, self.levels)
            for count, sequences in zip(self.survivors, self.sequences):
                errors = self._errors(sweep, units, candidates, sparsity, sequences)
                best = sorted(range(len(errors)), key=errors.__getitem__)[:count]
                candidates = [candidates[index] for index in best]
            errors = self._errors(sweep, units, candidates, sparsity, None)
            if errors and min(errors) < error:
                error, parent = min(errors), candidates[index_of_smallest(errors)]
            history.append(error)
        plan = self.plan(units, parent, sparsity)
        return Allocation(plan, {"evopress": _decision(sweep.decoder, self.unit, units, plan, history, start)})

    def plan(self, units: Sequence[Sequence[Projection]], levels: Levels, sparsity: float) -> SparsityPlan:
        """The plan that levels stand for: in every unit so many times the same number of weights more or less."""
        sizes = [_size(unit) for unit in units]
        weights = self.step * min(sparsity, 1 - sparsity) * min(sizes)
        shares = [sparsity + level * weights / size for level, size in zip(levels, sizes)]
        # Rounding may lead out of [0, 1] by a bit, where step * levels is 1.
        return SparsityPlan(
            {projection.name: min(max(share, 0.0), 1.0) for unit, share in zip(units, shares) for projection in unit}
        )

    def _errors(
        self,
        sweep: Sweep,
        units: Sequence[Sequence[Projection]],
        candidates: Sequence[Levels],
        sparsity: float,
        sequences: int | None,
    ) -> list[float]:
        plans = [self.plan(units, levels, sparsity) for levels in candidates]
        return sweep.output_errors(plans, "kl", label=LABEL, reference="dense", sequences=sequences)


def units_of(decoder: Decoder, unit: str) -> list[list[Projection]]:
    """What is given a level: the pruned projections of every block, or each projection alone."""
    if unit == "block":
        return [block.pruned for block in pruned_blocks(decoder)]
    return [[projection] for projection in decoder.projections.values()]


def mutants(generator: torch.Generator, parent: Levels, count: int, most: int) -> list[Levels]:
    """Different offspring by level-switch mutation, none of them the parent; fewer if so many are hard to find.

    Args:
        generator (`torch.Generator`): draws the switches.
        parent (`tuple[int, ...]`): a level for each of at least two units.
        count (`int`): how many are wanted.
        most (`int`): the largest level, and minus the smallest.
    """
    found: dict[Levels, None] = {}
    for _ in range(ATTEMPTS * count):
        levels = list(parent)
        for _ in range(1 + min(draw(generator, SWITCHES), draw(generator, SWITCHES))):
            lowered = draw(generator, len(levels))
            raised = (lowered + 1 + draw(generator, len(levels) - 1)) % len(levels)  # another one
            levels[lowered] -= 1
            levels[raised] += 1
        if tuple(levels) != parent and max(map(abs, levels)) <= most:
            found[tuple(levels)] = None
        if len(found) == count:
            break
    return list(found)


def _checked_sizes(name: str, values) -> tuple[int, ...]:
    sizes = check_several(name, values, "(2,)")
    for size in sizes:
        check_count(name, size, 1)
    return tuple(sizes)


def _size(unit: Sequence[Projection]) -> int:
    return sum(projection.numel for projection in unit)


def _decision(
    decoder: Decoder,
    unit: str,
    units: Sequence[Sequence[Projection]],
    plan: SparsityPlan,
    history: list[float],
    start: float,
) -> dict:
    blocks = [block.name for block in pruned_blocks(decoder)]
    names = blocks if unit == "block" else list(decoder.projections)
    return {
        "sparsity": {name: plan.sparsity[members[0].name] for name, members in zip(names, units)},
        "errors": history,  # of uniform sparsity, then of the parent after every generation
        "seconds": time.perf_counter() - start,
    }
