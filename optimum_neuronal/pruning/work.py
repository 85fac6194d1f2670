"""The work of a prune: measured on a sample of its blocks, and of the whole model by step."""

from dataclasses import dataclass, field

import numpy as np


BLOCKS = 3  # of a sample: the first, one in the middle, the last
FIRST, MIDDLE, LAST, OUTSIDE = range(4)  # rows of `Work.spent`
RUNS, OTHER, FORWARDS = range(3)  # columns
MOMENT, HIDDEN, KEPT, COMPARING = range(4)  # places of `Work.memory`


@dataclass
class Work:
    """Measured work on a sample.

    Args:
        spent (`ndarray`, shape (4, 3)):
            By place (first block, one in the middle, last, outside of blocks): seconds in runs of blocks, other seconds, and
            runs of a block on one sequence.
        memory (`ndarray`, shape (4,)):
            Bytes that exist for a moment in a block at most, of hidden states at most, of the answer for each block, and that
            exist for a moment outside of blocks at most.
    """

    spent: np.ndarray = field(default_factory=lambda: np.zeros((4, 3)))
    memory: np.ndarray = field(default_factory=lambda: np.zeros(4))

    def toward(self, other: "Work", share: float) -> "Work":
        """Return the work on the line from this to another: this at a share of 0, the other at 1, never negative."""
        spent = self.spent + share * (other.spent - self.spent)
        return Work(spent.clip(0), (self.memory + share * (other.memory - self.memory)).clip(0))


@dataclass(frozen=True)
class Step:
    """Work of a prune with one label.

    Args:
        label (`str`): of the progress bar.
        plans (`int`): sparsity plans that it tries; 0 if it runs the dense model alone.
        block_forwards (`int`): how often it runs a block on one sequence.
        seconds (`float`): of all of it.
        moment_bytes, hidden_bytes, kept_bytes (`int`):
            Memory at most: what exists for a moment, hidden states, and what it leaves behind.
    """

    label: str
    plans: int
    block_forwards: int
    seconds: float
    moment_bytes: int
    hidden_bytes: int
    kept_bytes: int

    def __add__(self, other: "Step") -> "Step":
        """Return both steps, one after the other, under this label."""
        sums = (getattr(self, name) + getattr(other, name) for name in ("plans", "block_forwards", "seconds"))
        kinds = ("moment_bytes", "hidden_bytes", "kept_bytes")
        return Step(self.label, *sums, *(max(getattr(self, kind), getattr(other, kind)) for kind in kinds))
