"""Results of single combinations of methods, the paper's aggregates over several, and how a table shows them."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from ..display import Cell


DENSE = "dense"


@dataclass(repr=False)
class Result:
    """Result of one combination: a row of the table.

    Args:
        sparsity (`float`): share of zeros asked for, in [0, 1); 0 for the dense model.
        saliency, topup (`str`): methods with their hyper-parameters; `"dense"` for the dense model.
        perplexity (`dict[str, float]`): test set -> perplexity of at least 1; lower is better.
        accuracy (`dict[str, dict]`): task -> `accuracy` in [0, 1], `stderr`, `metric`, `samples`.
        achieved_sparsity (`float`): share of zeros, counted in the weights.
        block_sparsity (`list[float]`): share of zeros of every block.
        row_sparsity (`dict[str, list[float]]`):
            Projection name -> mean sparsity of each stretch of its rows; empty if the top-up gives all rows the same.
        allocation_seconds, pruning_seconds (`float`): wall-clock time of the top-up, and of the final pruning.
        peak_memory (`dict[str, int]`): bytes by device during the prune, the model included.
        block_lambda, row_lambda (`float`, *optional*): NeuronAL's choices.
        decisions (`dict`): candidates and decisions of the top-up.
        config (`dict`): the `NeuronALConfig`.
        error (`str`, *optional*): reason why there are no figures.
        value_bits (`int`, *optional*): bits of each quantised value; None: values are not quantised.
        bits_per_weight (`float`, *optional*):
            Storage of the pruned projections in the packed format, masks, codes and scales included.
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
    value_bits: int | None = None
    bits_per_weight: float | None = None

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Result({self.method}, failed: {self.error})"
        found = [f"perplexity {name} {value:.2f}" for name, value in self.perplexity.items()]
        found += [f"mean accuracy {self.mean_accuracy:.2%}"] if self.accuracy else []
        return f"Result({', '.join([self.method, *found])})"

    @property
    def method(self) -> str:
        """The combination in a line: `"wanda + owl, 70.00%, 4 bits"`."""
        if self.saliency == DENSE:
            return DENSE
        return f"{self.saliency} + {self.topup}, {self.sparsity:.2%}{bits_text(self.value_bits)}"

    @property
    def seconds(self) -> float:
        """Seconds of the prune: allocation and final pruning."""
        return self.allocation_seconds + self.pruning_seconds

    @property
    def mean_perplexity(self) -> float:
        """Geometric mean of the perplexities, NaN if there are none."""
        return geometric_mean(list(self.perplexity.values()), math.nan)

    @property
    def mean_accuracy(self) -> float | None:
        """Mean accuracy over the tasks, in [0, 1]."""
        return sum(task["accuracy"] for task in self.accuracy.values()) / len(self.accuracy) if self.accuracy else None


def bits_text(value_bits: int | None) -> str:
    """Return the end of a text on a combination: `", 4 bits"`, or nothing if values are not quantised."""
    return "" if value_bits is None else f", {value_bits} bits"


def grouped(results: Iterable[Result], *attributes: str) -> dict[tuple, list[Result]]:
    """Return the results by their values of several attributes, in the order of each group's first result."""
    groups: dict[tuple, list[Result]] = {}
    for result in results:
        groups.setdefault(attrgetter(*attributes)(result), []).append(result)
    return groups


@dataclass(frozen=True)
class Aggregate:
    """Aggregate of a top-up at one sparsity over the `saliencies` that did not fail (paper, section 5.3).

    The factor is the geometric mean of perplexity over the dense model's, the retention that of mean accuracy; None: no
    result.
    """

    sparsity: float
    topup: str
    perplexity_factor: float | None
    accuracy_retention: float | None
    saliencies: int
    value_bits: int | None = None


def geometric_mean(values: Sequence[float], default: Any = None) -> Any:
    """Return the geometric mean of numbers of at least 0, which may be infinite; `default` if there are none."""
    if not values:
        return default
    return math.exp(sum(math.log(value) if value > 0 else -math.inf for value in values) / len(values))


class Column(NamedTuple):
    """Column of a table: a value for each row, None if there is none, the text of a value, and how to find the best."""

    title: str
    values: Sequence[Any]
    text: Callable[[Any], str] = str
    best: Callable[[Iterable[Any]], Any] | None = None


class Table(NamedTuple):
    """Arguments of `format_table`, `format_markdown` and `format_html` of `display`; `bold` are the best cells."""

    header: list[str]
    rows: list[list[str]]
    bold: frozenset[Cell]

    @classmethod
    def of(cls, columns: Sequence[Column], groups: Sequence[Hashable]) -> "Table":
        """Return a table of columns. In every group of rows, the best of every column that has a best is bold.

        `groups` has the group of every row; None: no group. Cells that look like the best are bold too. A group with a
        single value has no best.
        """
        cells = [["-" if value is None else column.text(value) for value in column.values] for column in columns]
        bold = set()
        for group in {*groups} - {None}:
            rows = [row for row, own in enumerate(groups) if own == group]
            for number, column in enumerate(columns):
                values = {row: column.values[row] for row in rows if column.values[row] is not None}
                if column.best is not None and len(values) > 1:
                    best = column.text(column.best(values.values()))
                    bold |= {(row, number) for row in values if cells[number][row] == best}
        return cls([column.title for column in columns], [list(row) for row in zip(*cells)], frozenset(bold))


def short(value: float) -> str:
    """Return a perplexity or a factor with two decimals, as a power of ten from 10,000."""
    return f"{value:.2f}" if value < 10000 else f"{value:.2e}"


def accuracy_text(task: dict[str, Any]) -> str:
    """Return a task's accuracy with its standard error, as far as there is one: `"60.00% ± 1.00%"`."""
    return f"{task['accuracy']:.2%}" + (f" ± {task['stderr']:.2%}" if task.get("stderr") is not None else "")
