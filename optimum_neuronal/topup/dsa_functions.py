"""DSA's allocation functions: what they are made of, and the statistics of the weights that they take."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..engine.statistics import wide_dtype
from ..model.projections import Block, Decoder
from ..trials.sweep import Sweep
from .by_block import block_sizes, pruned_blocks, wanda_metric
from .spreading import get_dist


@dataclass(frozen=True)
class ElementSums:
    """What a reduction may know of a block's elements x: how many, and sums over them; float64.

    Args:
        count (`int`): number of elements.
        total, squares, absolute, logs (`float`): sums of x, x^2, |x| and log |x|.
        positive, positive_logs (`float`): sums of x and of x log x over the elements above zero.
        least, most (`float`): the extremes.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    absolute: float = 0.0
    logs: float = 0.0
    positive: float = 0.0
    positive_logs: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @classmethod
    def of(cls, elements: torch.Tensor) -> "ElementSums":
        """Those of a tensor of any shape, taken in the widest type of its device."""
        wide = wide_dtype(elements.device)
        absolute, positive = elements.abs(), elements.clamp(min=0)
        sums = (
            elements.sum(dtype=wide),
            elements.square().sum(dtype=wide),
            absolute.sum(dtype=wide),
            absolute.log().sum(dtype=wide),
            positive.sum(dtype=wide),
            torch.special.xlogy(positive, positive).sum(dtype=wide),
            elements.min().to(wide),
            elements.max().to(wide),
        )
        return cls(elements.numel(), *torch.stack(sums).tolist())

    def __add__(self, other: "ElementSums") -> "ElementSums":
        sums = (
            getattr(self, name) + getattr(other, name)
            for name in ("count", "total", "squares", "absolute", "logs", "positive", "positive_logs")
        )
        return ElementSums(*sums, min(self.least, other.least), max(self.most, other.most))

    @property
    def mean(self) -> float:
        """Of the elements."""
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Of the elements, unbiased."""
        return max(self.squares - self.total * self.mean, 0.0) / max(self.count - 1, 1)


# The authors' tables (lib/autolayer.py of their repository). Element by element: an element and its block's sums.
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
    # Of the elements above zero as probabilities p = x / sum x: - sum p log p.
    "entropy": lambda m: math.log(m.positive) - m.positive_logs / m.positive if m.positive > 0 else math.nan,
}

# Importances of all blocks, float64, shape (blocks,) -> the same shape.
TRANSFORM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no_op": lambda v: v,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "exp": torch.exp,
    "log": torch.log,
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": torch.nn.functional.softplus,
}

LABEL = "DSA statistics"
MOST_TRANSFORMS = 2
Statistics = dict[tuple[str, str], torch.Tensor]  # (pre, reduce) -> importances, float64, shape (blocks,)


@dataclass(frozen=True)
class Function:
    """An allocation function: the names of its operations in their order, and half the width of its window."""

    pre: str
    reduce: str
    transforms: tuple[str, ...]
    lam: float

    def __str__(self) -> str:
        """As the authors write it: `"W:(ABSLOG)-(VAR)-(ATAN,ASIN)-(7)"`."""
        parts = (self.pre, self.reduce, ",".join(self.transforms))
        return f"W:({')-('.join(part.upper() for part in parts)})-({self.lam * 100:g})"

    def sparsities(self, decoder: Decoder, sparsity: float, statistics: Statistics) -> tuple[float, ...] | None:
        """One per block that has something to prune, in their order; None if some importances are infinite.

        Importances scaled to [0, 1] and turned around, times `2 * lam`, are densities, shifted to their mean.
        """
        importances = self.importances(statistics)
        if importances is None:
            return None
        return tuple(get_dist(sparsity, self.lam, -importances, block_sizes(pruned_blocks(decoder))).tolist())

    def importances(self, statistics: Statistics) -> torch.Tensor | None:
        """One value per block, float64; None if some are infinite. What is no number counts as zero (the authors')."""
        values = statistics[self.pre, self.reduce]
        for name in self.transforms:
            values = TRANSFORM[name](values)
        values = torch.where(values.isnan(), 0, values)
        return values if bool(values.isfinite().all()) else None


def block_statistics(sweep: Sweep) -> Statistics:
    """Importance of every block by every pair of element-wise operation and reduction, of Wanda's metric."""
    found = [scores for scores in sweep.dense_scores(_scores, LABEL) if scores]
    pairs = [(pre, reduce) for pre in PRE for reduce in REDUCE]
    return {pair: torch.tensor(values, dtype=torch.float64) for pair, values in zip(pairs, zip(*found))}


def _scores(block: Block, activations: dict[str, torch.Tensor]) -> list[float]:
    """For every pair of operations; none if nothing of the block is pruned."""
    if not block.pruned:
        return []

    def metrics():
        for projection in block.pruned:
            yield wanda_metric(projection, activations)

    whole = sum((ElementSums.of(metric) for metric in metrics()), ElementSums())
    moments = dict.fromkeys(PRE, ElementSums())
    for metric in metrics():  # made again rather than kept: a block's metrics take twice the room of its weights
        for name, operation in PRE.items():
            moments[name] += ElementSums.of(operation(metric, whole))
    return [reduce(moments[name]) for name in PRE for reduce in REDUCE.values()]
