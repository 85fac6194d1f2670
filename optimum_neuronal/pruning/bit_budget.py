"""A budget of bits a weight: which sparsities, with how many bits of every value, fit into it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..checkpoint.packed_size import packed_size
from ..config import NeuronALConfig
from ..formats.codebooks import BITS
from ..model.projections import Decoder


STEPS = 10_000  # sparsities are multiples of a ten-thousandth
HIGHEST = 0.95  # what leaves less than a twentieth of the weights is not tried
USUAL = 3  # bits of values that two to three bits a weight are usually spent on


class Pair(NamedTuple):
    """What a budget can be spent on.

    Args:
        value_bits (`int`): of every kept value.
        sparsity (`float`): share of zeros in all pruned projections, in [0, 1).
    """

    value_bits: int
    sparsity: float

    def of(self, config: NeuronALConfig) -> NeuronALConfig:
        """The config with this pair in place of its budget."""
        return replace(config, bits=None, sparsity=self.sparsity, value_bits=self.value_bits)


def pairs_within(decoder: Decoder, config: NeuronALConfig) -> list[Pair]:
    """What fits into a config's budget, with the least sparsity for these bits of values, or the most bits for a sparsity.

    Args:
        decoder ([`Decoder`]): its weights are not read.
        config ([`NeuronALConfig`]): of a prune.

    Returns:
        `list[Pair]`: of ascending sparsity; one, if the config says what sparsity or how many bits values are to have; none,
            if it has no budget.

    Raises:
        `ValueError`: nothing fits; the message says from which budget on something would.
    """
    if config.bits is None:
        return []
    if config.sparsity is not None:
        return [_with_sparsity(decoder, config)]
    if config.value_bits is not None:
        return [_with_value_bits(decoder, config, config.value_bits)]
    found: dict[float, Pair] = {}
    for value_bits in sorted(BITS):  # of two with the same sparsity, which is 0, the one with more bits
        sparsity = _least_sparsity(decoder, config, value_bits)
        if sparsity is not None and sparsity <= HIGHEST:
            found[sparsity] = Pair(value_bits, sparsity)
    if not found:
        raise _too_few(decoder, config, HIGHEST, min(BITS))
    return [found[sparsity] for sparsity in sorted(found)]


def settled(config: NeuronALConfig, decoder: Decoder) -> NeuronALConfig:
    """The config with sparsity and bits of values in place of a budget, if only one pair is possible; else as it is."""
    pairs = pairs_within(decoder, config)
    return pairs[0].of(config) if len(pairs) == 1 else config


def likely(config: NeuronALConfig, pairs: Sequence[Pair]) -> NeuronALConfig:
    """The config with one of its pairs, if it has any, from [`pairs_within`]: all take as many bytes."""
    if not pairs:
        return config
    return min(pairs, key=lambda pair: abs(pair.value_bits - USUAL)).of(config)


def _taken(decoder: Decoder, sparsity: float, value_bits: int) -> float:
    return packed_size(decoder, lambda projection: int(sparsity * projection.numel), value_bits).bits_per_weight


def _with_sparsity(decoder: Decoder, config: NeuronALConfig) -> Pair:
    for value_bits in BITS:
        if _taken(decoder, config.sparsity, value_bits) <= config.bits:
            return Pair(value_bits, config.sparsity)
    raise _too_few(decoder, config, config.sparsity, min(BITS))


def _with_value_bits(decoder: Decoder, config: NeuronALConfig, value_bits: int) -> Pair:
    sparsity = _least_sparsity(decoder, config, value_bits)
    if sparsity is None or sparsity > HIGHEST:
        raise _too_few(decoder, config, HIGHEST, value_bits)
    return Pair(value_bits, sparsity)


def _least_sparsity(decoder: Decoder, config: NeuronALConfig, value_bits: int) -> float | None:
    """By bisection; None if nothing fits."""
    low, high = -1, STEPS - 1  # nothing fits at `low`, something at `high`
    if _taken(decoder, high / STEPS, value_bits) > config.bits:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _taken(decoder, middle / STEPS, value_bits) <= config.bits else (middle, high)
    return high / STEPS


def _too_few(decoder: Decoder, config: NeuronALConfig, sparsity: float, value_bits: int) -> ValueError:
    least = math.ceil(1000 * _taken(decoder, sparsity, value_bits)) / 1000
    return ValueError(
        f"bits is {config.bits:g}, but {sparsity:.2%} sparsity with values of {value_bits} bits takes {least:g} bits a weight in "
        "this model, masks and scales included: give more bits"
        + (", or more sparsity." if config.sparsity is not None else ".")
    )
