"""Choosing a number: the smallest of several, the place where a condition turns, one at random."""

from collections.abc import Callable, Sequence

import torch


def index_of_smallest(values: Sequence[float]) -> int:
    """Where the smallest value stands; the first of equal ones.

    Raises:
        `ValueError`: there is no value.
    """
    return min(range(len(values)), key=values.__getitem__)


def bisect(is_too_small: Callable[[float], bool], low: float, high: float, steps: int) -> tuple[float, float]:
    """Halves an interval around the place from which on a number is no longer too small.

    Args:
        is_too_small: asked of the middle of the interval; True up to some number, False beyond it. The ends are
            never asked: where it is False everywhere, `low` stays, and where it is True everywhere, `high`.
        low, high (`float`): the interval.
        steps (`int`): how often it is halved. With more than a float's digits, its ends become neighbours or equal.

    Returns:
        `tuple`: the last interval's ends. `high` is the one to use where a number must not be too small.
    """
    for _ in range(steps):
        middle = (low + high) / 2
        if is_too_small(middle):
            low = middle
        else:
            high = middle
    return low, high


def draw(generator: torch.Generator, below: int) -> int:
    """A whole number from 0 to `below - 1`, all equally likely."""
    return int(torch.randint(below, (), generator=generator))
