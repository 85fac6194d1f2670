"""What one combination of methods gave, and the paper's aggregates over several."""

from dataclasses import dataclass, field
from typing import Any


DENSE = "dense"


@dataclass(repr=False)
class Result:
    """One combination: a row of the table.

    Args:
        sparsity (`float`): share of zeros asked for, in [0, 1); 0 for the dense model.
        saliency, topup (`str`): the methods, with the hyper-parameters that were given; `"dense"` for the dense model.
        perplexity (`dict[str, float]`): by test set, at least 1, lower is better.
        accuracy (`dict[str, dict]`): task -> `accuracy` in [0, 1], `stderr`, `metric`, `samples`.
        achieved_sparsity (`float`): share of zeros, counted.
        block_sparsity (`list[float]`): the same by block.
        row_sparsity (`dict[str, list[float]]`):
            Projection name -> sparsity of its rows, averaged over stretches of them, if rows may differ.
        allocation_seconds, pruning_seconds (`float`): wall-clock time of the top-up, and of the final pruning.
        peak_memory (`dict[str, int]`): bytes by device while it was pruned, the model included.
        block_lambda, row_lambda (`float`, *optional*): what NeuronAL chose.
        decisions (`dict`): what the top-up tried.
        config (`dict`): the `NeuronALConfig`.
        error (`str`, *optional*): why there are no figures.
        value_bits (`int`, *optional*): to how many bits kept values were rounded.
        bits_per_weight (`float`, *optional*):
            What a weight of the pruned projections takes as the packed format stores it, masks, codes and scales counted;
            None in records of earlier versions.
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
            told = [f"failed: {self.error}"]
        else:
            told = [f"perplexity {name} {value:.2f}" for name, value in self.perplexity.items()]
            told += [f"mean accuracy {self.mean_accuracy:.2%}"] if self.accuracy else []
        return f"Result({', '.join([self.method, *told])})"

    @property
    def method(self) -> str:
        """What was done, in a line: `"wanda + owl, 70.00%, 4 bits"`."""
        if self.saliency == DENSE:
            return DENSE
        return f"{self.saliency} + {self.topup}, {self.sparsity:.2%}{told_bits(self.value_bits)}"

    @property
    def mean_accuracy(self) -> float | None:
        """Mean accuracy over the tasks, in [0, 1]."""
        return sum(task["accuracy"] for task in self.accuracy.values()) / len(self.accuracy) if self.accuracy else None


def told_bits(value_bits: int | None) -> str:
    """What follows a method or a sparsity in a text: `", 4 bits"`, or nothing where values were not rounded."""
    return "" if value_bits is None else f", {value_bits} bits"


@dataclass(frozen=True)
class Aggregate:
    """A top-up at one sparsity over all saliencies and test sets (paper, section 5.3).

    Args:
        sparsity (`float`), topup (`str`): which.
        perplexity_factor (`float`): geometric mean of perplexity over the dense model's; lower is better.
        accuracy_retention (`float`, *optional*): geometric mean of mean accuracy over the dense model's.
        saliencies (`int`): over how many saliencies; those that failed are missing.
        value_bits (`int`, *optional*): of kept values, if they were rounded.
    """

    sparsity: float
    topup: str
    perplexity_factor: float | None
    accuracy_retention: float | None
    saliencies: int
    value_bits: int | None = None
