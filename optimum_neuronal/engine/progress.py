"""How far a prune has come: one line for all of it, and a bar for the blocks of the pass that it is at."""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import NamedTuple

from transformers.utils import logging


FORMAT = "{desc}{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"


class Stage(NamedTuple):
    """Passes over the blocks that are called the same.

    Args:
        passes (`int`): how many there will be, at most.
        work (`float`): of them all, in any unit that other stages share.
    """

    passes: int
    work: float


class Progress:
    """Shows how far a prune has come. Use it as a context manager; outside it nothing is shown.

    Args:
        stages (`Mapping[str, Stage]`): label of a pass -> what is planned, in order.
        quiet (`bool`): whether to show nothing.

    A stage may take fewer passes than planned: its share of the work counts as done when the next one begins.
    """

    def __init__(self, stages: Mapping[str, Stage], quiet: bool = False):
        self.stages, self.quiet = dict(stages), quiet
        self._passes = dict.fromkeys(stages, 0)
        self._bar, self._done, self._told = None, 0.0, ""

    def __enter__(self) -> "Progress":
        total = sum(stage.work for stage in self.stages.values())
        if not self.quiet and total:
            # Work of a kind comes at a rate of its own, so the mean so far foretells more than the last seconds do.
            self._bar = logging.tqdm(total=total, desc="Pruning", bar_format=FORMAT, leave=False, smoothing=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def over(self, blocks: range, label: str | None) -> Iterator[int]:
        """Yield the indices of blocks, while a bar shows the block and the line the share of all work.

        Args:
            blocks (`range`): of the pass that begins.
            label (`str`, *optional*): of the pass; without one, nothing is shown.
        """
        if self.quiet or label is None:
            yield from blocks
            return
        before, share, told = self._begin(label)
        for index in logging.tqdm(blocks, desc=label, unit="block", leave=False):
            yield index
            self._tell(told)  # a pass that this one needed may have come in between
            self._advance(before + share * (index + 1) / blocks.stop)

    def _begin(self, label: str) -> tuple[float, float, str]:
        """Return the work before the pass that begins, its own work, and the text of the line."""
        if label not in self.stages:  # not planned: a top-up from elsewhere asks more than it said
            return 0.0, 0.0, self._told
        names, (passes, work) = list(self.stages), self.stages[label]
        done = min(self._passes[label], passes - 1)
        self._passes[label] = done + 1
        before = sum(self.stages[name].work for name in names[: names.index(label)]) + work / passes * done
        named = f"{label}, pass {done + 1} of {passes}" if passes > 1 else label
        told = f"Pruning, {named}" if label != "Pruning" else label
        self._tell(told)
        self._advance(before)
        return before, work / passes, told

    def _tell(self, told: str) -> None:
        if self._bar is not None and told != self._told:
            self._bar.set_description(told)
            self._told = told

    def _advance(self, work: float) -> None:
        if self._bar is not None and work > self._done:
            self._bar.update(work - self._done)
            self._done = work
