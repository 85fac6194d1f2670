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

    def __repr__(self) -> str:
        if self.error is not None:
            told = [f"failed: {self.error}"]
        else:
            told = [f"perplexity {name} {value:.2f}" for name, value in self.perplexity.items()]
            told += [f"mean accuracy {self.mean_accuracy:.2%}"] if self.accuracy else []
        method = DENSE if self.saliency == DENSE else f"{self.saliency} + {self.topup}, {self.sparsity:.2%}"
        return f"Result({', '.join([method, *told])})"

    @property
    def mean_accuracy(self) -> float | None:
        """Mean accuracy over the tasks, in [0, 1]."""
        return sum(task["accuracy"] for task in self.accuracy.values()) / len(self.accuracy) if self.accuracy else None


@dataclass(frozen=True)
class Aggregate:
    """A top-up at one sparsity over all saliencies and test sets (paper, section 5.3).

    Args:
        sparsity (`float`), topup (`str`): which.
        perplexity_factor (`float`): geometric mean of perplexity over the dense model's; lower is better.
        accuracy_retention (`float`, *optional*): geometric mean of mean accuracy over the dense model's.
        saliencies (`int`): over how many saliencies; those that failed are missing.
    """

    sparsity: float
    topup: str
    perplexity_factor: float | None
    accuracy_retention: float | None
    saliencies: int
