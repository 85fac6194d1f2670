"""Round numbers along a log axis, written out: matplotlib's own are powers of ten, of which a narrow range has none."""

import math


COARSE = (10,), (10, 30), (10, 20, 50), (10, 15, 20, 30, 50, 70)  # of every decade, in tenths
MOST = 10  # ticks


def label_log_axis(axis) -> None:
    """Sets the ticks of an axis whose limits are final."""
    ticks = log_ticks(*axis.get_view_interval())
    axis.set_ticks(ticks, [f"{tick:,.10g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def log_ticks(low: float, high: float) -> list[float]:
    """Three to ten round numbers between two different positive ones."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in COARSE:
        ticks = [float(f"{factor}e{decade - 1}") for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / MOST)]
    from matplotlib.ticker import MaxNLocator  # so narrow a range is nearly linear

    ticks = MaxNLocator(5, min_n_ticks=3).tick_values(low, high)
    return [float(f"{tick:.10g}") for tick in ticks if low <= tick <= high]
