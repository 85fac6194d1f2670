"""Checks of hyper-parameters, for every method: the same words for the same mistake."""

import math


def check_whole(name: str, value: int, least: int) -> None:
    """Raises `ValueError` unless a hyper-parameter is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: expected a whole number of at least {least}.")


def check_number(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Raises `ValueError` unless a hyper-parameter is a finite number from `least` to `most`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not least <= value <= most:
        bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ValueError(f"{name} is {value!r}: expected a number {bounds}.")
