"""Results of single combinations of methods, and the paper's aggregates over several."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any


DENSE = "dense"
PRESET = "preset"  # in place of a saliency; the name of the preset is then in place of the top-up


@dataclass(repr=False)
class Result:
    """Result of one combination."""

    sparsity: float  # requested share of zeros, in [0, 1); 0 for the dense model
    saliency: str  # with hyper-parameters; or "dense" or "preset"
    topup: str  # with hyper-parameters; or "dense" or the name of the preset
    perplexity: dict[str, float] = field(default_factory=dict)  # by test set; lower is better
    accuracy: dict[str, dict[str, Any]] = field(default_factory=dict)  # by task: accuracy, stderr, metric, samples
    achieved_sparsity: float = 0.0  # share of zeros, counted in the weights
    block_sparsity: list[float | None] = field(default_factory=list)  # share of zeros by block; None: left out
    allocation_seconds: float = 0.0  # these two count what the combination needs, also if another one computed it
    pruning_seconds: float = 0.0
    peak_memory: dict[str, int] = field(default_factory=dict)  # bytes by device during the prune, with the model
    block_lambda: float | None = None  # NeuronAL's choices
    row_lambda: float | None = None
    decisions: dict[str, Any] = field(default_factory=dict)  # candidates and decisions of the top-up
    config: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # why there are no figures
    bits_per_weight: float | None = None  # storage of the pruned projections in the packed format
    setting: dict[str, Any] = field(default_factory=dict)  # values of swept fields of the config

    @property
    def method(self) -> str:
        """The combination in a line: `"wanda + owl, 70% sparsity"` or `"preset paper, 70% sparsity"`."""
        if self.saliency == DENSE:
            return DENSE
        methods = self.label if self.saliency == PRESET else f"{self.saliency} + {self.topup}"
        return ", ".join([methods, self.target, *(f"{name} {value}" for name, value in self.setting.items())])

    @property
    def label(self) -> str:
        """The name among top-ups: `"owl"`, or `"preset paper"`."""
        return f"{PRESET} {self.topup}" if self.saliency == PRESET else self.topup

    @property
    def target(self) -> str:
        """The requested sparsity in words: `"70% sparsity"`."""
        return f"{100 * self.sparsity:.4g}% sparsity"

    @property
    def seconds(self) -> float:
        """Seconds of the prune: allocation and final pruning."""
        return self.allocation_seconds + self.pruning_seconds

    @property
    def mean_perplexity(self) -> float:
        """The geometric mean over the test sets, NaN without any."""
        return geometric_mean(list(self.perplexity.values()), math.nan)

    @property
    def mean_accuracy(self) -> float | None:
        return sum(task["accuracy"] for task in self.accuracy.values()) / len(self.accuracy) if self.accuracy else None


def group_by(results: Iterable[Any], *attributes: str) -> dict[Any, list[Any]]:
    """Return the results by their values of several attributes, in the order of each group's first result."""
    groups: dict[Any, list[Any]] = {}
    for result in results:
        groups.setdefault(attrgetter(*attributes)(result), []).append(result)
    return groups


@dataclass(frozen=True)
class Aggregate:
    """Aggregate of a top-up or preset at one sparsity over saliencies and models (paper, section 5.3).

    Only saliencies count that every top-up has a result with, so that all top-ups are compared over the same ones.
    """

    sparsity: float
    topup: str
    perplexity_factor: float | None  # PPLFac: geometric mean of perplexity over the dense model's; None: no result
    accuracy_retention: float | None  # AccRet: geometric mean of mean accuracy over the dense model's
    saliencies: list[str]


def aggregate(models: Iterable[tuple[Result, Sequence[Result]]]) -> list[Aggregate]:
    """Return the aggregates over models, each with the dense result and all others."""
    entries = [(number, dense, result) for number, (dense, results) in enumerate(models) for result in results]
    aggregates = []
    for sparsity in dict.fromkeys(result.sparsity for _, _, result in entries):
        # label -> number of the model and saliency -> pairs of dense and pruned result
        runs: dict[str, dict[tuple[int, str], list[tuple[Result, Result]]]] = {}
        for number, dense, result in entries:
            if result.sparsity == sparsity and result.error is None:
                pairs = runs.setdefault(result.label, {}).setdefault((number, result.saliency), [])
                pairs.append((dense, result))
        methods = [set(by_saliency) for by_saliency in runs.values() if all(s != PRESET for _, s in by_saliency)]
        shared = set.intersection(*methods) if methods else set()
        for label, by_saliency in runs.items():
            kept = shared & by_saliency.keys() or by_saliency.keys()
            used = [pair for key, pairs in by_saliency.items() if key in kept for pair in pairs]
            factors = [r.perplexity[name] / dense.perplexity[name] for dense, r in used for name in r.perplexity]
            retained = [r.mean_accuracy / dense.mean_accuracy for dense, r in used if dense.mean_accuracy]
            saliencies = list(dict.fromkeys(result.saliency for _, result in used))
            means = geometric_mean(factors), geometric_mean(retained)
            aggregates.append(Aggregate(sparsity, label, *means, saliencies))
    return aggregates


def geometric_mean(values: Sequence[float], default: Any = None) -> Any:
    """Return the geometric mean of numbers of at least 0, which may be infinite; `default` if there are none."""
    if not values:
        return default
    return math.exp(sum(math.log(value) if value > 0 else -math.inf for value in values) / len(values))
