"""What a question to the engine costs, told beforehand. Each question's own [`Pass`] stands beside it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


# How often one block runs on a sequence: whole; without what only feeds its output; without any projection.
Runs = tuple[int, int, int]


@dataclass(frozen=True)
class Pass(ABC):
    """What is asked of the engine; where it cannot be known, the most that may be asked.

    Args:
        label (`str`): what the progress bar calls it.
        plans (`int`): how many plans are tried; 0 if the dense model alone runs.
        reference (`str`): where dense activations and saliency come from: `"sparse-stream"` or `"dense"`.
        sequences (`int`, *optional*): on how many of the alignment sequences; all if not given.
        times (`int`): how often it is asked.
        by_score (`bool`):
            Whether a saliency that updates weights solves nothing for these plans: they fall by score alone, or take
            what was solved before.
    """

    label: str
    plans: int
    reference: str = "dense"
    sequences: int | None = None
    times: int = 1
    by_score: bool = False

    @abstractmethod
    def runs(self, index: int, last: int) -> Runs:
        """How often the block of an index runs on each sequence, if no candidate is abandoned."""

    @property
    def needs_dense(self) -> bool:
        """Whether the dense model's own pass over the alignment sequences must have been made."""
        return self.reference == "dense"

    @property
    def distributions(self) -> int:
        """How many models' next-token distributions are computed and compared, for each sequence."""
        return 0

    @property
    def logits(self) -> int:
        """How many tensors of logits, of so many positions as are compared at a time, exist together."""
        return 0

    @property
    def rankings(self) -> int:
        """How often the weights of every row are sorted by saliency: for every plan, if each has a stream of its own."""
        return self.plans if self.reference == "sparse-stream" else min(self.plans, 1)

    @property
    def gradients(self) -> int:
        """How often gradients go back through every block, for each sequence: twice a run's work each."""
        return 0

    def count_masks(self, sequences: int) -> int:
        """How many masks are made of every weight, if it runs on so many sequences."""
        return self.plans

    def count_sequences(self, samples: int, alignment: int) -> int:
        """How many sequences each of its runs is of.

        Args:
            samples, alignment (`int`): all calibration sequences, and those that trials are measured on.
        """
        return min(self.sequences or alignment, alignment)

    def hidden_sequences(self, samples: int, alignment: int, deep: bool) -> int:
        """Sequences whose hidden states exist at a time, at most.

        That is the first block's inputs, which are kept throughout, with `reference="dense"` the last block's output
        in the dense model; from the second block on the inputs of every stream; and a block's outputs.

        Args:
            deep (`bool`): whether there is more than one block.
        """
        kept = 2 if self.reference == "dense" else 1
        return alignment * kept + self.count_sequences(samples, alignment) * self.streams(deep)

    def streams(self, deep: bool) -> int:
        """Streams of hidden states beside the first block's inputs: of every plan, before and behind a block."""
        return max(self.plans, 1) * (2 if deep else 1)


class CalibrationPass(Pass):
    """One pass over all calibration sequences, whose first inputs are let go on the way."""

    @property
    def needs_dense(self) -> bool:
        return False

    def count_sequences(self, samples: int, alignment: int) -> int:
        return samples

    def hidden_sequences(self, samples: int, alignment: int, deep: bool) -> int:
        return 2 * samples
