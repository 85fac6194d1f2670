"""What was found of how fast the forms of a model compute, and what memory they take, and how it is told."""

from dataclasses import asdict, dataclass, field
from typing import Any

from ..display import format_bytes, format_table


FASTER = 1.02  # from which ratio on a difference is more than chance


@dataclass(frozen=True)
class Timing:
    """One kind of work, done by all forms of a model in turns.

    Args:
        work (`str`): `"decode, batch 4"` or `"prefill, 512 tokens"`.
        dense, packed (`float`): tokens per second of the whole batch, medians.
        lowest, highest (`float`): of the rounds' ratios packed to dense.
        ratio (`float`): their median: above 1, packed weights are faster.
        others, other_ratios (`dict[str, float]`): the same of the model's other forms, by their names.
    """

    work: str
    dense: float
    packed: float
    ratio: float
    lowest: float
    highest: float
    others: dict[str, float] = field(default_factory=dict)
    other_ratios: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SpeedReport:
    """What [`measure_speed`] found. `print(report)` shows it as a table.

    Args:
        model (`str`): what was measured.
        dtype (`str`), device (`str`), threads (`int`): of the computation.
        timings (`list[Timing]`): one per kind of work.
        dense_bytes, packed_bytes (`int`): of the models' parameters and buffers.
        resident (`dict[str, int]`):
            Bytes that the process grew by with each model, if known: `"dense"`, `"packed"`, and other forms.
        other_bytes (`dict[str, int]`): as `packed_bytes`, of the other forms: `"4 bits, int8"`, `"torchao int4"`.
        left_out (`dict[str, str]`): name of a form -> why there is none.
    """

    model: str
    dtype: str
    device: str
    threads: int
    timings: list[Timing]
    dense_bytes: int
    packed_bytes: int
    resident: dict[str, int]
    other_bytes: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-serialisable."""
        return asdict(self)

    @property
    def verdict(self) -> str:
        """What the figures say, whichever way they fall."""
        slower = [timing.work for timing in self.timings if timing.ratio < 1 / FASTER]
        faster = [timing.work for timing in self.timings if timing.ratio > FASTER]
        found = [("faster", faster), ("slower", slower)]
        told = [f"Packed weights are {how} here for: {'; '.join(work)}." for how, work in found if work]
        return " ".join(told or ["Packed weights are neither faster nor slower here."])

    def __str__(self) -> str:
        columns = [part for name in self.other_bytes for part in (name, "times")]
        header = ["tokens per second", "dense", "packed", "times", "lowest and highest", *columns]
        rows = [_speeds(timing) for timing in self.timings]
        model = {"dense": self.dense_bytes, "packed": self.packed_bytes, **self.other_bytes}
        sizes = [_sizes("model", model), *([_sizes("resident", self.resident)] if self.resident else [])]
        memory = format_table(["memory", "dense", "packed", "times", *columns], sizes)
        about = f"{self.model}, {self.dtype} on {self.device}, {self.threads} thread{'s' * (self.threads > 1)}"
        left_out = [f"Not shown: {name}: {why}." for name, why in self.left_out.items()]
        return "\n\n".join([about, format_table(header, rows), memory, "\n".join([self.verdict, *left_out])])


def _speeds(timing: Timing) -> list[str]:
    """A row of the table of speeds."""
    own = [f"{timing.dense:.1f}", f"{timing.packed:.1f}", f"{timing.ratio:.2f}"]
    others = [
        text for name, rate in timing.others.items() for text in (f"{rate:.1f}", f"{timing.other_ratios[name]:.2f}")
    ]
    return [timing.work, *own, f"{timing.lowest:.2f} to {timing.highest:.2f}", *others]


def _sizes(name: str, bytes_of: dict[str, int]) -> list[str]:
    """A row of the table of memory."""
    dense, *others = bytes_of.values()
    row = [name, format_bytes(dense)]
    for size in others:
        row += [format_bytes(size), f"{size / max(1, dense):.2f}"]
    return row
