"""Averages of what was measured."""

import math
from collections.abc import Sequence


def geometric_mean(values: Sequence[float]) -> float | None:
    """Geometric mean of numbers of at least 0, which may be infinite; None if there are none."""
    if not values:
        return None
    return math.exp(sum(math.log(value) if value > 0 else -math.inf for value in values) / len(values))
