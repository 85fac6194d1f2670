"""Rates: how many bits the weights of each projection get under a budget of bytes.

A projection's divergence is that of the model's next-token distributions when this projection alone is quantised.
"""

import math
from collections.abc import Mapping, Sequence


RATES = (2, 3, 4, 5, 6, 7, 8)  # bits
FALL = 4.0  # of the divergence for each bit: half the distance between levels, a quarter of the squared error

Curve = Mapping[int, float]  # bits -> divergence, in nats per predicted token
Sizes = Mapping[int, int]  # bits -> bytes, with scales, steps and padding


def extended(measured: Curve, rates: Sequence[int] = RATES) -> dict[int, float]:
    """Return the divergence at every rate: what was measured, and a quarter for each bit more than the nearest rate below.

    Args:
        measured (`Mapping[int, float]`): bits -> divergence, at least one.
        rates (`Sequence[int]`): bits.
    """
    found = {}
    for bits in rates:
        known = max((own for own in measured if own <= bits), default=min(measured))
        found[bits] = measured[known] * FALL ** (known - bits)
    return found


def choose_rates(curves: Mapping[str, Curve], sizes: Mapping[str, Sizes], budget: int) -> dict[str, int]:
    """Return the bits of each projection, so that the sum of divergences is small and the sum of bytes within the budget.

    Each begins at its lowest rate. The projection whose divergence falls most for a byte is raised next, as long as one fits.

    Args:
        curves (`Mapping[str, Mapping[int, float]]`): projection name -> divergence at each of its rates, see [`extended`].
        sizes (`Mapping[str, Mapping[int, int]]`): projection name -> bytes at the same rates.
        budget (`int`): bytes in all.

    Raises:
        `ValueError`: the lowest rates do not fit.
    """
    chosen = {name: min(own) for name, own in sizes.items()}
    left = budget - sum(sizes[name][bits] for name, bits in chosen.items())
    if left < 0:
        raise ValueError(
            f"The lowest rates take {budget - left} bytes, but the budget is {budget} bytes: give more bits per weight."
        )
    while True:
        best, most = None, -math.inf
        for name, bits in chosen.items():
            for higher in (own for own in sizes[name] if own > bits and sizes[name][own] - sizes[name][bits] <= left):
                gain = (curves[name][bits] - curves[name][higher]) / max(1, sizes[name][higher] - sizes[name][bits])
                if gain > most:
                    best, most = (name, higher), gain
        if best is None:
            return chosen
        name, higher = best
        left -= sizes[name][higher] - sizes[name][chosen[name]]
        chosen[name] = higher
