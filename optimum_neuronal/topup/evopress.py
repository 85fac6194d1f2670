"""EvoPress: evolutionary search that moves sparsity between blocks, by the error of the whole model's output."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar

import torch

from ..common.validation import hyper
from ..model.projections import Decoder, Projection
from ..saliency.plan import Plan
from ..trials import PlanEvaluator
from ..trials.output_errors import OutputErrors
from .base import Allocation, TopUp, register_topup
from .distribution import pruned_blocks


UNITS = ("block", "projection")
SWITCHES = 3  # an offspring makes the smaller of two draws from 1 to 3 of them, hence mostly one
DRAWS_PER_OFFSPRING = 20  # before it settles for fewer: small models have few neighbors

Offsets = tuple[int, ...]  # steps of every unit above or below the target


@register_topup("evopress")
@dataclass(frozen=True)
class EvoPress(TopUp):
    """(1 + lambda) search with level-switch mutation and multi-step selection.

    Sieberling et al., EvoPress: Accurate Dynamic Model Compression via Evolutionary Search, 2025, Algorithm 1.

    The search begins with uniform sparsity. An offspring raises the sparsity of one unit by a step and lowers that of
    another, one to three times. A step is the same number of weights in every unit, so the mean stays. The KL divergence
    from the dense model's next-token distributions decides: of all offspring on few alignment sequences, of survivors
    on more. The authors draw new tokens in every generation; here the sequences stay.

    Args:
        generations (`int`): how often the parent may be replaced.
        offspring (`int`): candidates per generation.
        survivors (`tuple[int, ...]`): how many candidates survive each step; the last always keeps one.
        sequences (`tuple[int, ...]`):
            Alignment sequences that each of these steps measures on; the last step measures on all.
        unit (`str`): `"block"`, or `"projection"` (the authors'), which takes longer to search.
        step (`float`):
            A step's weights, as a share of `min(s, 1 - s)` times the weights of the smallest unit, s being the target.
            The authors': 1/16 of a square projection.
        levels (`int`): how many steps a unit may be above or below the target; `step * levels` is at most 1.
        search_seed (`int`): seed of the mutations, independent of the draw of calibration sequences.
    """

    paper: ClassVar[str] = (
        "Sieberling et al., EvoPress: Accurate Dynamic Model Compression via Evolutionary Search, 2025"
    )
    compares_outputs: ClassVar[bool] = True

    generations: int = hyper(14, 0)
    offspring: int = hyper(8, 1)
    survivors: tuple[int, ...] = hyper((2,), 1)
    sequences: tuple[int, ...] = hyper((2,), 1)
    unit: str = hyper("block", choices=UNITS)
    step: float = hyper(0.0625, 0, 1, above=True)
    levels: int = hyper(8, 1)
    search_seed: int = hyper(0, 0)

    def __post_init__(self):
        if len(self.survivors) != len(self.sequences):
            raise ValueError(f"survivors {self.survivors} and sequences {self.sequences}: expected equal lengths.")
        if self.step * self.levels > 1:
            raise ValueError(f"step is {self.step} and levels is {self.levels}: expected a product of at most 1.")

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        units = units_of(evaluator.decoder, self.unit)
        parent: Offsets = (0,) * len(units)
        if len(units) < 2 or sparsity == 0:  # nothing to exchange
            return Allocation(self.plan(units, parent, sparsity))
        generator = torch.Generator().manual_seed(self.search_seed)

        def ranked(candidates: Sequence[Offsets], sequences: int | None = None) -> list[tuple[float, Offsets]]:
            plans = [self.plan(units, offsets, sparsity) for offsets in candidates]
            label = "exchanging sparsity between blocks (EvoPress)"
            errors = evaluator.measure(OutputErrors("kl", label, sequences=sequences), plans)
            return sorted(zip(errors, candidates), key=itemgetter(0))

        ((error, parent),) = ranked([parent])
        history = [error]
        for _ in range(self.generations):
            candidates = mutants(generator, parent, self.offspring, self.levels)
            for count, sequences in zip(self.survivors, self.sequences):
                candidates = [offsets for _, offsets in ranked(candidates, sequences)[:count]]
            error, parent = min([(error, parent), *ranked(candidates)], key=itemgetter(0))
            history.append(error)
        plan = self.plan(units, parent, sparsity)
        names = [block.name for block in pruned_blocks(evaluator.decoder)] if self.unit == "block" else plan.sparsity
        by_unit = {name: plan.sparsity[members[0].name] for name, members in zip(names, units)}
        # Errors of uniform sparsity, then of the parent after every generation.
        return Allocation(plan, {"evopress": {"sparsity": by_unit, "errors": history}})

    def plan(self, units: Sequence[Sequence[Projection]], offsets: Offsets, sparsity: float) -> Plan:
        """Return the plan that prunes `offset` steps more in every unit, one offset for each."""
        sizes = [sum(projection.numel for projection in unit) for unit in units]
        weights = self.step * min(sparsity, 1 - sparsity) * min(sizes)
        sparsities = [sparsity + offset * weights / size for offset, size in zip(offsets, sizes)]
        # Rounding may lead out of [0, 1] by a bit where step * levels is 1.
        return Plan({p.name: min(max(s, 0.0), 1.0) for unit, s in zip(units, sparsities) for p in unit})


def units_of(decoder: Decoder, unit: str) -> list[list[Projection]]:
    """Return the units that exchange sparsity: the pruned projections of every block, or each projection alone."""
    if unit == "block":
        return [block.pruned for block in pruned_blocks(decoder)]
    return [[projection] for projection in decoder.projections.values()]


def mutants(generator: torch.Generator, parent: Offsets, count: int, most: int) -> list[Offsets]:
    """Return different offspring by level-switch mutation, with offsets of at most `most`; fewer if they are hard to find."""

    def mutant() -> Offsets | None:
        offsets = list(parent)
        for _ in range(1 + min(draw(generator, SWITCHES), draw(generator, SWITCHES))):
            lowered = draw(generator, len(offsets))
            raised = (lowered + 1 + draw(generator, len(offsets) - 1)) % len(offsets)  # another one
            offsets[lowered] -= 1
            offsets[raised] += 1
        return tuple(offsets) if tuple(offsets) != parent and max(map(abs, offsets)) <= most else None

    found: dict[Offsets, None] = {}
    for _ in range(DRAWS_PER_OFFSPRING * count):
        if (offsets := mutant()) is not None:
            found[offsets] = None
        if len(found) == count:
            break
    return list(found)


def draw(generator: torch.Generator, below: int) -> int:
    """Return a random integer from 0 to `below - 1`."""
    return int(torch.randint(below, (), generator=generator))
