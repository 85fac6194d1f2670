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
    """Result of one combination: a row of the table.

    Args:
        sparsity (`float`): share of zeros asked for, in [0, 1). 0 for the dense model and for quantized ones.
        saliency, topup (`str`): methods with their hyper-parameters; or `"dense"`; or `"quantized"` and `"rates"`; or
            `"preset"` and its name.
        perplexity (`dict[str, float]`): test set -> perplexity of at least 1, lower is better.
        accuracy (`dict[str, dict]`): task -> `accuracy` in [0, 1], `stderr`, `metric`, `samples`.
        achieved_sparsity (`float`): share of zeros, counted in the weights.
        block_sparsity (`list[float]`): share of zeros in every block.
        rotation_seconds, allocation_seconds, pruning_seconds (`float`): time of the rotation, the top-up and the final
            pruning. Of several results with the same rotation, the first has the time to learn it.
        peak_memory (`dict[str, int]`): bytes by device during the prune, the model included.
        block_lambda, row_lambda (`float`, *optional*): NeuronAL's choices.
        decisions (`dict`): candidates and decisions of the top-up.
        config (`dict`): the `NeuronALConfig`.
        error (`str`, *optional*): why there are no figures.
        budget (`float`, *optional*): bits per weight asked for. None: weights are not quantized.
        bits_per_weight (`float`, *optional*): storage of the pruned projections in the packed format.
    """

    sparsity: float
    saliency: str
    topup: str
    perplexity: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, dict[str, Any]] = field(default_factory=dict)
    achieved_sparsity: float = 0.0
    block_sparsity: list[float] = field(default_factory=list)
    rotation_seconds: float = 0.0
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
    """Aggregate of a top-up or preset at one sparsity or budget of bits over `saliencies` (paper, section 5.3).

    The factor is the geometric mean of perplexity over the dense model's, the retention that of mean accuracy. None: no
    result.
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
