"""Results of single combinations of methods, and the paper's aggregates over several."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any


DENSE = "dense"
QUANTISED, RATES = "quantised", "rates"  # in place of saliency and top-up
PRESET = "preset"  # in place of a saliency; the name of the preset is then in place of the top-up


@dataclass(repr=False)
class Result:
    """Result of one combination: a row of the table.

    Args:
        sparsity (`float`): share of zeros asked for, in [0, 1); 0 for the dense model, and for quantised ones.
        saliency, topup (`str`):
            Methods with their hyper-parameters; `"dense"` for the dense model; `"quantised"` and `"rates"` for quantised ones;
            `"preset"` and its name if a preset chose the methods, which `config` then holds.
        perplexity (`dict[str, float]`): test set -> perplexity of at least 1; lower is better.
        accuracy (`dict[str, dict]`): task -> `accuracy` in [0, 1], `stderr`, `metric`, `samples`.
        achieved_sparsity (`float`): share of zeros, counted in the weights.
        block_sparsity (`list[float]`): share of zeros of every block.
        row_sparsity (`dict[str, list[float]]`):
            Projection name -> mean sparsity of each stretch of its rows; empty if the top-up gives all rows the same.
        rotation_seconds, allocation_seconds, pruning_seconds (`float`):
            Wall-clock time of the rotation, of the top-up, and of the final pruning. The first of several results with the same
            rotation has the time to learn it.
        peak_memory (`dict[str, int]`): bytes by device during the prune, the model included.
        block_lambda, row_lambda (`float`, *optional*): NeuronAL's choices.
        decisions (`dict`): candidates and decisions of the top-up.
        config (`dict`): the `NeuronALConfig`.
        error (`str`, *optional*): reason why there are no figures.
        budget (`float`, *optional*): bits a weight asked for; None: weights are not quantised.
        bits_per_weight (`float`, *optional*):
            Storage of the pruned projections in the packed format, masks or scales included.
    """

    sparsity: float
    saliency: str
    topup: str
    perplexity: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, dict[str, Any]] = field(default_factory=dict)
    achieved_sparsity: float = 0.0
    block_sparsity: list[float] = field(default_factory=list)
    row_sparsity: dict[str, list[float]] = field(default_factory=dict)
    allocation_seconds: float = 0.0
    pruning_seconds: float = 0.0
    peak_memory: dict[str, int] = field(default_factory=dict)
    block_lambda: float | None = None
    row_lambda: float | None = None
    decisions: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    budget: float | None = None
    bits_per_weight: float | None = None
    rotation_seconds: float = 0.0

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Result({self.method}, failed: {self.error})"
        found = [f"perplexity {name} {value:.2f}" for name, value in self.perplexity.items()]
        found += [f"mean accuracy {self.mean_accuracy:.2%}"] if self.accuracy else []
        return f"Result({', '.join([self.method, *found])})"

    @property
    def method(self) -> str:
        """The combination in a line: `"wanda + owl, 70.00%"`, `"preset fast, 70.00%"`, or `"quantised, 2.4 bits"`."""
        if self.saliency == DENSE:
            return DENSE
        if self.budget is not None:
            return f"{self.saliency}, {self.budget:g} bits"
        return f"{self.pair}, {self.sparsity:.2%}"

    @property
    def pair(self) -> str:
        """Saliency and top-up: `"wanda + owl"`; or the preset that chose them: `"preset fast"`."""
        return self.label if self.saliency == PRESET else f"{self.saliency} + {self.topup}"

    @property
    def label(self) -> str:
        """The name among top-ups: `"owl"`, or `"preset fast"`."""
        return f"{PRESET} {self.topup}" if self.saliency == PRESET else self.topup

    @property
    def target(self) -> str:
        """The amount asked for, in words: `"70 % sparsity"`, or `"2.4 bits"`."""
        return f"{100 * self.sparsity:.4g} % sparsity" if self.budget is None else f"{self.budget:g} bits"

    @property
    def seconds(self) -> float:
        """Seconds of the prune: rotation, allocation and final pruning."""
        return self.rotation_seconds + self.allocation_seconds + self.pruning_seconds

    @property
    def mean_perplexity(self) -> float:
        """Geometric mean of the perplexities, NaN if there are none."""
        return geometric_mean(list(self.perplexity.values()), math.nan)

    @property
    def mean_accuracy(self) -> float | None:
        """Mean accuracy over the tasks, in [0, 1]."""
        return sum(task["accuracy"] for task in self.accuracy.values()) / len(self.accuracy) if self.accuracy else None


def grouped(results: Iterable[Result], *attributes: str) -> dict[tuple, list[Result]]:
    """Return the results by their values of several attributes, in the order of each group's first result."""
    groups: dict[tuple, list[Result]] = {}
    for result in results:
        groups.setdefault(attrgetter(*attributes)(result), []).append(result)
    return groups


@dataclass(frozen=True)
class Aggregate:
    """Aggregate of a top-up at one sparsity, or budget of bits, over the `saliencies` that did not fail (paper, section 5.3).

    A preset is an aggregate of its own: its `topup` is `"preset fast"`.
    The factor is the geometric mean of perplexity over the dense model's, the retention of mean accuracy. None: no result.
    """

    sparsity: float
    topup: str
    perplexity_factor: float | None
    accuracy_retention: float | None
    saliencies: int
    budget: float | None = None


def geometric_mean(values: Sequence[float], default: Any = None) -> Any:
    """Return the geometric mean of numbers of at least 0, which may be infinite; `default` if there are none."""
    if not values:
        return default
    return math.exp(sum(math.log(value) if value > 0 else -math.inf for value in values) / len(values))
