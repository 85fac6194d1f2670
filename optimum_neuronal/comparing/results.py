"""Results of single combinations of methods, and the paper's aggregates over several."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple


DENSE = "dense"
UNIFORM = "uniform"
PRESET = "preset"  # in place of a saliency; the name of the preset is then in place of the top-up


@dataclass(repr=False)
class Result:
    """Result of one combination."""

    sparsity: float  # requested share of zeros, in [0, 1); 0 for the dense model
    saliency: str  # its title; or "dense" or "preset"
    topup: str  # its title, which names variant and steps; or "dense", or name and methods of the preset
    perplexity: dict[str, float] = field(default_factory=dict)  # by test set; lower is better
    accuracy: dict[str, dict[str, Any]] = field(default_factory=dict)  # by task: accuracy, stderr, samples
    achieved_sparsity: float = 0.0  # share of zeros, counted in the weights
    block_sparsity: list[float | None] = field(default_factory=list)  # share of zeros by block; None: left out
    projection_sparsity: dict[str, float] = field(default_factory=dict)  # share of zeros by projection
    allocation_seconds: float = 0.0  # these two count what the combination needs, even if another one computed it
    pruning_seconds: float = 0.0
    peak_memory: dict[str, int] = field(default_factory=dict)  # bytes by device while pruning, with the model
    block_lambda: float | None = None  # NeuronAL's choices
    row_lambda: float | None = None
    decisions: dict[str, Any] = field(default_factory=dict)  # candidates and decisions of the top-up
    config: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # why it failed
    bits_per_weight: float | None = None  # storage of the pruned projections in the packed format
    setting: dict[str, Any] = field(default_factory=dict)  # values of swept fields of the config

    @property
    def method(self) -> str:
        """The combination in a line: `"wanda + owl, 70% sparsity"` or `"preset fast (alps + uniform), 70% sparsity"`."""
        if self.saliency == DENSE:
            return DENSE
        return ", ".join([self.methods, self.target, *(f"{name} {value}" for name, value in self.setting.items())])

    @property
    def methods(self) -> str:
        """Saliency and top-up: `"wanda + owl"`, or `"preset fast (alps + uniform)"`."""
        return self.label if self.saliency == PRESET else f"{self.saliency} + {self.topup}"

    @property
    def names(self) -> set[str]:
        """Names of saliency, top-up and pair without hyperparameters: `"wanda"`, `"owl"` and `"wanda+owl"`."""
        return {_base(self.saliency), self.topup_name, f"{_base(self.saliency)}+{self.topup_name}"}

    @property
    def label(self) -> str:
        """The name among top-ups: `"owl"`, or `"preset fast (alps + uniform)"`."""
        return f"{PRESET} {self.topup}" if self.saliency == PRESET else self.topup

    @property
    def target(self) -> str:
        """The requested sparsity in words: `"70% sparsity"`."""
        return f"{100 * self.sparsity:.4g}% sparsity"

    @property
    def topup_name(self) -> str:
        """The name of the top-up or preset, without variant and hyperparameters."""
        return _base(self.topup)

    @property
    def seconds(self) -> float:
        """Seconds of allocation and final pruning."""
        return self.allocation_seconds + self.pruning_seconds

    @property
    def mean_perplexity(self) -> float:
        """The geometric mean over the test sets, NaN without any."""
        return geometric_mean(list(self.perplexity.values()), math.nan)

    @property
    def mean_accuracy(self) -> float | None:
        return sum(task["accuracy"] for task in self.accuracy.values()) / len(self.accuracy) if self.accuracy else None

    @property
    def mean_accuracy_error(self) -> float | None:
        """The standard error of the mean over tasks."""
        errors = [task.get("stderr") for task in self.accuracy.values()]
        return math.hypot(*errors) / len(errors) if errors and None not in errors else None


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
    improvement: float | None  # by which part perplexity is lower than with uniform sparsity, on average (Table 2)
    saliencies: list[str]  # of PPLFac
    accuracy_saliencies: list[str]  # of AccRet


class _Entry(NamedTuple):
    """A finished result of one of several models, beside the dense model's."""

    key: tuple  # what top-ups are compared over: a model, a saliency and a setting
    dense: Result
    result: Result


def aggregate(
    models: Iterable[tuple[Result, Sequence[Result]]], accuracy_over: Sequence[str] | None = None
) -> list[Aggregate]:
    """Return the aggregates over models, each with the dense result and all others.

    `accuracy_over` are the saliencies to compute AccRet over. If none of them has results: the same as PPLFac.
    """
    entries = [
        _Entry((number, result.saliency, repr(result.setting)), dense, result)
        for number, (dense, results) in enumerate(models)
        for result in results
        if result.error is None
    ]
    aggregates = []
    for sparsity, members in group_by(entries, "result.sparsity").items():
        uniform = {entry.key: entry.result for entry in members if entry.result.topup_name == UNIFORM}
        by_label = group_by(members, "result.label")
        keys = [{one.key for one in own} for own in by_label.values() if own[0].result.saliency != PRESET]
        shared = set.intersection(*keys) if keys else set()
        for label, own in by_label.items():
            counted = [entry for entry in own if entry.key in shared] or own
            answered = [entry for entry in counted if _base(entry.result.saliency) in (accuracy_over or ())] or counted
            compared = [entry for entry in counted if entry.key in uniform and entry.result.topup_name != UNIFORM]
            factors = [ratio for entry in counted for ratio in _ratios(entry.result, entry.dense)]
            gains = [1 - ratio for entry in compared for ratio in _ratios(entry.result, uniform[entry.key])]
            both = [entry for entry in answered if entry.dense.mean_accuracy and entry.result.accuracy]
            retained = [entry.result.mean_accuracy / entry.dense.mean_accuracy for entry in both]
            means = geometric_mean(factors), geometric_mean(retained), sum(gains) / len(gains) if gains else None
            aggregates.append(Aggregate(sparsity, label, *means, _saliencies(counted), _saliencies(answered)))
    return aggregates


def _ratios(result: Result, other: Result) -> list[float]:
    """Return the perplexity over another result's, for each test set."""
    return [value / other.perplexity[name] for name, value in result.perplexity.items()]


def _base(title: str) -> str:
    """Return the name of a method without its variant and hyperparameters."""
    return title.partition(",")[0].partition(" (")[0]


def _saliencies(entries: Sequence[_Entry]) -> list[str]:
    return list(dict.fromkeys(entry.result.saliency for entry in entries))


def geometric_mean(values: Sequence[float], default: Any = None) -> Any:
    """Return the geometric mean of numbers of at least 0, which may be infinite; `default` without any."""
    if not values:
        return default
    return math.exp(sum(math.log(value) if value > 0 else -math.inf for value in values) / len(values))
