"""Compares what is counted in the weights of a block or of a kind of projection with what was recorded."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..common.display import escaped


LONGEST = 500  # characters of a text in config.json that are shown
SAME_BITS = 1e-6  # mean bits may differ by so much from those recorded
MORE_ZEROS = 1e-4  # share of zeros beyond what was recorded that may come from rounding to a smaller dtype


@dataclass
class Share:
    """Zeros counted in some weights, and bits of their codes.

    Args:
        zeros, weights (`int`): counted in the files.
        recorded (`float`, *optional*): share of zeros in the sparsity_config.
        coded, code_bits (`int`): how many of the weights are quantised in the files, and the bits of their codes together.
        recorded_bits (`float`, *optional*): mean bits of codes in the sparsity_config.
    """

    zeros: int = 0
    weights: int = 0
    recorded: float | None = None
    coded: int = 0
    code_bits: int = 0
    recorded_bits: float | None = None

    @property
    def sparsity(self) -> float:
        """Share of zeros, in [0, 1]."""
        return self.zeros / self.weights if self.weights else 0.0

    @property
    def bits(self) -> float | None:
        """Mean bits of the codes of quantised weights; None without any."""
        return self.code_bits / self.coded if self.coded else None

    def problem(self) -> str | None:
        """Return how zeros and bits differ from what was recorded, None if they do not."""
        if self.recorded is None:
            return None
        if not self.weights:
            return "has no weights in the files"
        bits, recorded = self.bits, self.recorded_bits
        if bits is not None and recorded is not None and abs(bits - recorded) > SAME_BITS:
            return f"has codes of {bits:.4g} bits instead of {recorded:.4g}"
        missing = round(self.recorded * self.weights) - self.zeros
        if missing <= 0 and self.sparsity - self.recorded <= MORE_ZEROS:
            return None
        difference = f"{abs(missing):,} zeros {'fewer' if missing > 0 else 'more'} than recorded"
        return f"has {difference}: {self.sparsity:.6%} instead of {self.recorded:.6%}"


def share_table(title: str, shares: Mapping[str, Share]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table: of bits if any of the weights are quantised in the files, else of zeros."""
    if any(share.coded for share in shares.values()):
        rows = [
            [escaped(name, LONGEST), f"{s.weights:,}", _bits(s.recorded_bits), _bits(s.bits)]
            for name, s in shares.items()
        ]
        return _with_found([[title, "weights", "bits recorded", "bits found"], *rows])
    table = [[title, "weights", "recorded", "found"]]
    for name, share in shares.items():
        recorded = "-" if share.recorded is None else f"{share.recorded:.2%}"
        table.append([escaped(name, LONGEST), f"{share.weights:,}", recorded, f"{share.sparsity:.2%}"])
    return _with_found(table)


def _with_found(table: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table, without the column of what was recorded if nothing was."""
    if all(row[2] == "-" for row in table[1:]):
        table = [[*row[:2], row[3]] for row in table]
    return table[0], table[1:]


def _bits(bits: float | None) -> str:
    return "-" if bits is None else f"{bits:.2f}"
