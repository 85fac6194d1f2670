"""How many bits a config may ask for: of each kept value, and of all that is stored for a weight."""

from collections.abc import Iterable
from typing import Any

from .formats.codebooks import BITS


LEAST_BITS, MOST_BITS = 1.0625, 9.0625  # a weight: a mask and scales alone; with 8 bits of every value


def check_value_bits(value_bits: Any) -> None:
    """Raises `TypeError` or `ValueError` unless there are codes of so many bits."""
    if isinstance(value_bits, bool) or not isinstance(value_bits, int):
        raise TypeError(f"value_bits is {value_bits!r}: expected a whole number: {_told(BITS)}.")
    if value_bits not in BITS:
        raise ValueError(
            f"value_bits is {value_bits}: expected one of {_told(BITS)}, or None to leave values as they are."
        )


def check_budget(bits_per_weight: Any, sparsity: float | None, value_bits: int | None, pattern: str | None) -> None:
    """Raises `TypeError` or `ValueError` unless a budget of bits a weight leaves room for something, and asks for one thing.

    Args:
        bits_per_weight: what masks, codes and scales may take.
        sparsity (`float`, *optional*), value_bits (`int`, *optional*), pattern (`str`, *optional*): as the config's.
    """
    if isinstance(bits_per_weight, bool) or not isinstance(bits_per_weight, (int, float)):
        raise TypeError(f"bits_per_weight is {bits_per_weight!r}: expected a number, such as 2.4.")
    if not LEAST_BITS < bits_per_weight <= MOST_BITS:
        raise ValueError(
            f"bits_per_weight is {bits_per_weight}: expected more than {LEAST_BITS}, which masks and scales alone take, and at most {MOST_BITS}, "
            "which every value takes with 8 bits."
        )
    if sparsity is not None and value_bits is not None:
        raise ValueError(
            f"sparsity={sparsity:g}, value_bits={value_bits} and bits_per_weight={bits_per_weight:g} are given, but two of them decide the third: "
            "leave one out."
        )
    if sparsity is None and pattern is not None:
        raise ValueError(
            f"The pattern {pattern} decides the sparsity: give sparsity too, and value_bits follow from bits_per_weight."
        )


def _told(bits: Iterable[int]) -> str:
    return ", ".join(map(str, bits))
