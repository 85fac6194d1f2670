"""A budget of bits a weight: which sparsities and bits of values fit into it, and which pair loses least."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..config import NeuronALConfig
from ..formats.codebooks import BITS
from ..model.packed_size import packed_size
from ..model.projections import Decoder
from ..sparsity.plan import SparsityPlan
from ..topup import Allocation, TopUp
from ..topup.allocation import index_of_smallest
from ..trials.sweep import Sweep


STEPS = 10_000  # sparsities are multiples of a ten-thousandth
HIGHEST = 0.95  # what leaves less than a twentieth of the weights is not tried
USUAL = 3  # bits of values in most models of two to three bits a weight


class Pair(NamedTuple):
    """A way to spend a budget.

    Args:
        value_bits (`int`): of every kept value.
        sparsity (`float`): share of zeros in all pruned projections, in [0, 1).
    """

    value_bits: int
    sparsity: float

    def of(self, config: NeuronALConfig) -> NeuronALConfig:
        """Return the config with this pair in place of its budget."""
        return replace(config, bits_per_weight=None, sparsity=self.sparsity, value_bits=self.value_bits)


def pairs_within(decoder: Decoder, config: NeuronALConfig) -> list[Pair]:
    """Return the pairs that fit into a config's budget: with the least sparsity for each number of bits of values.

    Args:
        decoder ([`Decoder`]): its weights are not read.
        config ([`NeuronALConfig`]): of a prune.

    Returns:
        `list[Pair]`: of ascending sparsity; one if the config has a sparsity (with the most bits that fit) or bits of
            values; none without a budget.

    Raises:
        `ValueError`: nothing fits; the message gives the least budget that would do.
    """
    if config.bits_per_weight is None:
        return []
    found: dict[float, Pair] = {}
    if config.sparsity is not None:
        most = next((bits for bits in BITS if _fits(decoder, config, config.sparsity, bits)), None)
        if most is not None:
            found[config.sparsity] = Pair(most, config.sparsity)
    else:  # of two pairs with the same sparsity, which is 0, the one with more bits stays
        for value_bits in sorted(BITS) if config.value_bits is None else [config.value_bits]:
            sparsity = _least_sparsity(decoder, config, value_bits)
            if sparsity is not None and sparsity <= HIGHEST:
                found[sparsity] = Pair(value_bits, sparsity)
    if not found:
        raise _too_few(decoder, config)
    return [found[sparsity] for sparsity in sorted(found)]


def likely(config: NeuronALConfig, pairs: Sequence[Pair]) -> NeuronALConfig:
    """Return the config with one of its pairs, from [`pairs_within`], if it has any. All take as many bytes."""
    if not pairs:
        return config
    return min(pairs, key=lambda pair: abs(pair.value_bits - USUAL)).of(config)


def _bits(decoder: Decoder, sparsity: float, value_bits: int) -> float:
    """Return the bits that a weight takes, masks and scales included."""
    return packed_size(decoder, lambda projection: int(sparsity * projection.numel), value_bits).bits_per_weight


def _fits(decoder: Decoder, config: NeuronALConfig, sparsity: float, value_bits: int) -> bool:
    return _bits(decoder, sparsity, value_bits) <= config.bits_per_weight


def _least_sparsity(decoder: Decoder, config: NeuronALConfig, value_bits: int) -> float | None:
    """Return the least sparsity that fits, by bisection; None if none does."""
    low, high = -1, STEPS - 1  # nothing fits at `low`, something at `high`
    if not _fits(decoder, config, high / STEPS, value_bits):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(decoder, config, middle / STEPS, value_bits) else (middle, high)
    return high / STEPS


def _too_few(decoder: Decoder, config: NeuronALConfig) -> ValueError:
    sparsity = HIGHEST if config.sparsity is None else config.sparsity
    value_bits = config.value_bits or min(BITS)
    least = math.ceil(1000 * _bits(decoder, sparsity, value_bits)) / 1000
    return ValueError(
        f"bits_per_weight is {config.bits_per_weight:g}, but {sparsity:.2%} sparsity with values of {value_bits} bits takes "
        f"{least:g} bits a weight in this model, masks and scales included: give more bits"
        + (", or more sparsity." if config.sparsity is not None else ".")
    )


SOLVING, LABEL = "Weights of few bits", "Bits"
NEAR = 2.0  # times the least error with uniform sparsity: a search may change the order of nearer pairs
SEARCHED = 2  # near pairs that the top-up decides for, at most


def check_choice(decoder: Decoder) -> None:
    """Raise `ValueError` if the model has nothing to compare pairs by."""
    if not decoder.predicts_next_token:
        raise ValueError(
            f"{type(decoder.model).__name__} has no causal language-model head, so that bits alone cannot be divided by what "
            "is lost: give value_bits too, or sparsity."
        )


def choose_pair(sweep: Sweep, pairs: Sequence[Pair], topup: TopUp) -> tuple[Pair, Allocation, list[dict[str, Any]]]:
    """Choose the pair whose model is nearest to the dense one, by its next-token distributions.

    All pairs are compared with uniform sparsity, on weights that are solved on the dense model's inputs. The loss depends
    on where the sparsity goes, so near pairs are compared with the top-up's own plans, if it solves weights for candidates.

    Args:
        sweep ([`Sweep`]): without quantised values.
        pairs (`Sequence[Pair]`): of ascending sparsity, as [`pairs_within`] returns them.
        topup ([`TopUp`]): decides where the sparsity goes.

    Returns:
        `tuple`: the best pair; the top-up's allocation for it; and every pair with its `uniform` error in nats per
            predicted token, the nearest ones with the `error` of the top-up's plan.
    """
    solvers = {pair.sparsity: replace(sweep.engine.applier, value_bits=pair.value_bits) for pair in pairs}
    levels = sweep.solve(solvers, "bits", SOLVING)
    plans = [SparsityPlan(dict.fromkeys(sweep.decoder.projections, pair.sparsity)) for pair in pairs]
    errors = sweep.output_errors(plans, "kl", LABEL, levels)
    compared = {pair: {**pair._asdict(), "uniform": error} for pair, error in zip(pairs, errors)}
    ranked = sorted(pairs, key=lambda pair: compared[pair]["uniform"])
    near = [pair for pair in ranked[:SEARCHED] if compared[pair]["uniform"] <= NEAR * min(errors)]
    found: dict[Pair, Allocation] = {}
    if len(near) > 1 and topup.uses_levels(sweep.saliency):
        for pair in near:
            own = sweep.with_value_bits(pair.value_bits)
            allocation = topup.allocate(own, pair.sparsity)
            error = own.output_errors([allocation.plan], "kl", LABEL, allocation.levels or levels)[0]
            found[pair], compared[pair]["error"] = replace(allocation, levels=None), error
        errors = [compared[pair].get("error", math.inf) for pair in pairs]
    best = pairs[index_of_smallest(errors)]
    if best not in found:
        found[best] = topup.allocate(sweep.with_value_bits(best.value_bits), best.sparsity)
    return best, found[best], list(compared.values())
