"""Rates: bits per weight of each projection under a budget of bytes, in place of a sparsity."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from ..model.projections import Decoder, Projection, by_owner
from ..packed.formats.quantized import quantized_bytes
from ..saliency.low_bit import has_steps
from ..saliency.plan import DENSE, RatePlan
from ..trials import Trials
from .base import Allocation, TopUp


LABEL = "measuring what each projection's rounding costs"
RATES = (2, 3, 4, 5, 6, 7, 8)  # bits
FALL = 4.0  # of the divergence for each bit: half the distance between levels, a quarter of the squared error

Sizes = Mapping[int, int]  # bits -> bytes, with scales, steps and padding


@dataclass(frozen=True)
class Rates(TopUp):
    """The bits of each projection, if the config sets `bits_per_weight`; not registered as a top-up.

    A projection gets more bits if quantizing it alone, to the fewest bits, changes the model's next-token distributions
    more. The experts of a layer, which share a parameter, share a rate.
    """

    name: ClassVar[str] = "rates"

    budget: float  # bits per weight of all projections together, for codes and scales
    by: str = "divergence"  # or "uniform": rates are as equal as the budget allows

    @property
    def decides(self) -> bool:
        return self.by != "uniform"

    def suited_to(self, decoder: Decoder) -> "Rates":
        units = _Units(decoder.projections.values())
        least = 8 * sum(min(own.values()) for own in units.sizes.values()) / units.weights
        if least > self.budget:
            raise ValueError(
                f"bits_per_weight is {self.budget:g}, but codes of {min(RATES)} bits and their scales take {least:.4g} bits "
                "per weight in this model: set more bits."
            )
        return self if decoder.predicts_next_token else replace(self, by="uniform")

    def even(self, decoder: Decoder) -> RatePlan:
        """Return rates as equal as the budget allows: one more bit for the first projections that it suffices for."""
        units = _Units(decoder.projections.values())
        budget = units.budget(self.budget)
        left = {bits: budget - sum(own[bits] for own in units.sizes.values()) for bits in RATES}
        rate = max((bits for bits in RATES if left[bits] >= 0), default=RATES[0])
        chosen, spare = dict.fromkeys(units.sizes, rate), left[rate]
        for name, own in units.sizes.items():
            if rate < RATES[-1] and own[rate + 1] - own[rate] <= spare:
                chosen[name], spare = rate + 1, spare - (own[rate + 1] - own[rate])
        return units.plan(chosen)

    def forwards(self, decoder, saliency, aligned, samples) -> int:
        units = len(by_owner(decoder.projections.values()))
        return 0 if self.by == "uniform" else aligned * len(decoder.blocks) * (1 + units // 2)

    def allocate(self, trials: Trials, sparsity: float) -> Allocation:
        if self.by == "uniform":
            return Allocation(self.even(trials.decoder), {"rates": {"by": self.by}})
        dense, found = dict.fromkeys(trials.decoder.projections, DENSE), {}
        quantized = trials.quantize(RATES[0])
        blocks = trials.decoder.blocks
        for index in trials.runner.progress(range(len(blocks)), LABEL):
            # The units of a block together, so that no more streams exist than these.
            members = _Units(blocks[index].pruned).members
            plans = [RatePlan(dense | dict.fromkeys(names, RATES[0])) for names in members.values()]
            errors = trials.output_errors(plans, "kl", None, quantized) if plans else []
            found |= {name: max(0.0, error) for name, error in zip(members, errors)}
        units = _Units(trials.decoder.projections.values())
        plan = units.plan(choose_rates(found, units.sizes, units.budget(self.budget)))
        return Allocation(plan, {"rates": {"by": self.by, "bits": RATES[0], "divergences": found}})


class _Units:
    """Projections by the parameter that holds them, which has one rate. Units have the name of their first projection."""

    def __init__(self, projections: Iterable[Projection]):
        groups = by_owner(projections)
        self.members = {own[0].name: [p.name for p in own] for own in groups}
        self.sizes: dict[str, Sizes] = {}
        for first, *others in groups:
            (rows, columns), shared = first.shape, first.expert is not None
            shape = (1 + len(others), rows, columns)
            self.sizes[first.name] = {b: quantized_bytes(shape, b, has_steps(rows, b, shared)) for b in RATES}
        self.weights = sum(p.numel for own in groups for p in own)

    def budget(self, bits: float) -> int:
        """Return the bytes of all weights at so many bits each."""
        return math.floor(bits * self.weights / 8)

    def plan(self, chosen: Mapping[str, int]) -> RatePlan:
        return RatePlan({name: chosen[unit] for unit, names in self.members.items() for name in names})


def choose_rates(divergences: Mapping[str, float], sizes: Mapping[str, Sizes], budget: int) -> dict[str, int]:
    """Return the bits of each unit, for a small sum of divergences within a budget of bytes.

    `divergences` are at the fewest bits, in nats per predicted token; each bit more leaves a quarter. All begin at the
    fewest bits, which fit. The unit whose divergence falls most per byte is raised next.
    """
    chosen = {name: min(own) for name, own in sizes.items()}
    left = budget - sum(sizes[name][bits] for name, bits in chosen.items())
    while True:
        gains = {}
        for name, bits in chosen.items():
            for higher, size in sizes[name].items():
                more = size - sizes[name][bits]
                if higher > bits and more <= left:
                    fall = divergences[name] * (FALL ** (RATES[0] - bits) - FALL ** (RATES[0] - higher))
                    gains[name, higher, more] = fall / max(1, more)
        if not gains:
            return chosen
        name, higher, more = max(gains, key=gains.__getitem__)
        chosen[name], left = higher, left - more
