"""Results of single combinations of methods, and the paper's aggregates over several."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any


DENSE = "dense"
QUANTIZED, RATES = "quantized", "rates"  # in place of saliency and top-up
PRESET = "preset"  # in place of a saliency; the name of the preset is then in place of the top-up


@dataclass(repr=False)
class Result:
    """Result of one combination: a row of the table."""

    sparsity: float  # share of zeros asked for, in [0, 1); 0 for the dense model and for quantized ones
    saliency: str  # with hyper-parameters; or "dense", "quantized" or "preset"
    topup: str  # with hyper-parameters; or "dense", "rates" or the name of the preset
    perplexity: dict[str, float] = field(default_factory=dict)  # by test set; lower is better
    accuracy: dict[str, dict[str, Any]] = field(default_factory=dict)  # by task: accuracy, stderr, metric, samples
    achieved_sparsity: float = 0.0  # share of zeros, counted in the weights
    block_sparsity: list[float] = field(default_factory=list)  # share of zeros in every block
    rotation_seconds: float = 0.0  # of several results with the same rotation, the first has the time to learn it
    allocation_seconds: float = 0.0
    pruning_seconds: float = 0.0
    peak_memory: dict[str, int] = field(default_factory=dict)  # bytes by device during the prune, with the model
    block_lambda: float | None = None  # NeuronAL's choices
    row_lambda: float | None = None
    decisions: dict[str, Any] = field(default_factory=dict)  # candidates and decisions of the top-up
    config: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # why there are no figures
    budget: float | None = None  # bits per weight asked for; None: weights are not quantized
    bits_per_weight: float | None = None  # storage of the pruned projections in the packed format

    def __repr__(self) -> str:
        found = [f"perplexity {name} {value:.2f}" for name, value in self.perplexity.items()]
        found += [f"mean accuracy {self.mean_accuracy:.2%}"] if self.accuracy else []
        return f"Result({', '.join([self.method, *(found if self.error is None else [f'failed: {self.error}'])])})"

    @property
    def method(self) -> str:
        """The combination in a line: `"wanda + owl, 70 % sparsity"` or `"preset paper, 70 % sparsity"`."""
        if self.saliency == DENSE:
            return DENSE
        pair = {PRESET: self.label, QUANTIZED: QUANTIZED}.get(self.saliency, f"{self.saliency} + {self.topup}")
        return f"{pair}, {self.target}"

    @property
    def label(self) -> str:
        """The name among top-ups: `"owl"`, or `"preset paper"`."""
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
        """The geometric mean over the test sets, NaN without any."""
        return geometric_mean(list(self.perplexity.values()), math.nan)

    @property
    def mean_accuracy(self) -> float | None:
        return sum(task["accuracy"] for task in self.accuracy.values()) / len(self.accuracy) if self.accuracy else None


def grouped(results: Iterable[Result], *attributes: str) -> dict[tuple, list[Result]]:
    """Return the results by their values of several attributes, in the order of each group's first result."""
    groups: dict[tuple, list[Result]] = {}
    for result in results:
        groups.setdefault(attrgetter(*attributes)(result), []).append(result)
    return groups


@dataclass(frozen=True)
class Aggregate:
    """Aggregate of a top-up or preset at one sparsity or budget over several saliencies (paper, section 5.3)."""

    sparsity: float
    topup: str
    perplexity_factor: float | None  # geometric mean of perplexity over the dense model's; None: no result
    accuracy_retention: float | None  # geometric mean of mean accuracy over the dense model's
    saliencies: int
    budget: float | None = None


def geometric_mean(values: Sequence[float], default: Any = None) -> Any:
    """Return the geometric mean of numbers of at least 0, which may be infinite; `default` if there are none."""
    if not values:
        return default
    return math.exp(sum(math.log(value) if value > 0 else -math.inf for value in values) / len(values))
