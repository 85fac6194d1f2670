"""Results of single combinations of methods, and the paper's aggregates over several."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any


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
    accuracy: dict[str, dict[str, Any]] = field(default_factory=dict)  # by task: accuracy, stderr, metric, samples
    achieved_sparsity: float = 0.0  # share of zeros, counted in the weights
    block_sparsity: list[float | None] = field(default_factory=list)  # share of zeros by block; None: left out
    allocation_seconds: float = 0.0  # these two count what the combination needs, even if another one computed it
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
        """The combination in a line: `"wanda + owl, 70% sparsity"` or `"preset fast (alps + uniform), 70% sparsity"`."""
        if self.saliency == DENSE:
            return DENSE
        methods = self.label if self.saliency == PRESET else f"{self.saliency} + {self.topup}"
        return ", ".join([methods, self.target, *(f"{name} {value}" for name, value in self.setting.items())])

    @property
    def label(self) -> str:
        """The name among top-ups: `"owl"`, or `"preset fast (alps + uniform)"`."""
        return f"{PRESET} {self.topup}" if self.saliency == PRESET else self.topup

    @property
    def target(self) -> str:
        """The requested sparsity in words: `"70% sparsity"`."""
        return f"{100 * self.sparsity:.4g}% sparsity"

    @property
    def is_uniform(self) -> bool:
        return self.topup.partition(",")[0] == UNIFORM

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
    improvement: float | None  # mean share of perplexity below uniform sparsity (paper, Table 2)
    saliencies: list[str]  # of PPLFac; with a number of models where it is not all of them
    accuracy_saliencies: list[str]  # of AccRet


Pair = tuple[Result, Result]  # of the dense model and of a combination
Key = tuple[int, str, str]  # the number of the model, the saliency and the setting
Runs = dict[Key, list[Pair]]


def aggregate(
    models: Iterable[tuple[Result, Sequence[Result]]], accuracy_over: Sequence[str] | None = None
) -> list[Aggregate]:
    """Return the aggregates over models, each with the dense result and all others.

    `accuracy_over` are the saliencies to compute AccRet over. If none of them has results: the same as PPLFac.
    """
    entries = [(number, dense, result) for number, (dense, results) in enumerate(models) for result in results]
    count = 1 + max((number for number, *_ in entries), default=0)
    aggregates = []
    for sparsity in dict.fromkeys(result.sparsity for _, _, result in entries):
        by_label: dict[str, Runs] = {}
        for number, dense, result in entries:
            if result.sparsity == sparsity and result.error is None:
                runs = by_label.setdefault(result.label, {})
                runs.setdefault((number, result.saliency, repr(result.setting)), []).append((dense, result))
        methods = [set(runs) for runs in by_label.values() if all(saliency != PRESET for _, saliency, _ in runs)]
        shared = set.intersection(*methods) if methods else set()
        for label, runs in by_label.items():
            kept = [key for key in runs if key in shared] or list(runs)
            asked = [key for key in kept if key[1].partition(",")[0] in (accuracy_over or ())] or kept
            pairs = [pair for key in kept for pair in runs[key]]
            factors = [r.perplexity[name] / dense.perplexity[name] for dense, r in pairs for name in r.perplexity]
            answered = [pair for key in asked for pair in runs[key]]
            retained = [
                r.mean_accuracy / dense.mean_accuracy for dense, r in answered if dense.accuracy and r.accuracy
            ]
            means = geometric_mean(factors), geometric_mean(retained), _improvement(pairs, entries)
            aggregates.append(Aggregate(sparsity, label, *means, _names(kept, count), _names(asked, count)))
    return aggregates


def _improvement(pairs: Sequence[Pair], entries: Iterable[tuple[int, Result, Result]]) -> float | None:
    """Return the mean share by which perplexities are lower than with uniform sparsity; None if it was not run."""
    uniform = {_twin(dense, result): result for _, dense, result in entries if result.is_uniform}
    shares = [
        1 - result.perplexity[name] / uniform[_twin(dense, result)].perplexity[name]
        for dense, result in pairs
        for name in result.perplexity
        if _twin(dense, result) in uniform and not result.is_uniform
    ]
    return sum(shares) / len(shares) if shares else None


def _twin(dense: Result, result: Result) -> tuple:
    """Return what a result has in common with its counterpart of uniform sparsity."""
    return id(dense), result.sparsity, result.saliency, repr(result.setting)


def _names(keys: Sequence[Key], count: int) -> list[str]:
    """Return the saliencies of keys. In parentheses: the variant, and the number of models unless it is all."""
    names = []
    for title, own in Counter(saliency for _, saliency in dict.fromkeys(key[:2] for key in keys)).items():
        name, _, rest = title.partition(", ")
        notes = [rest] if rest else []
        notes += [] if own == count else [f"{own} of {count} models"]
        names.append(f"{name} ({', '.join(notes)})" if notes else name)
    return names


def geometric_mean(values: Sequence[float], default: Any = None) -> Any:
    """Return the geometric mean of numbers of at least 0, which may be infinite; `default` if there are none."""
    if not values:
        return default
    return math.exp(sum(math.log(value) if value > 0 else -math.inf for value in values) / len(values))
