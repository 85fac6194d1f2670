"""Random draws of evolutionary searches."""

from collections.abc import Callable, Hashable

import torch


def draw(generator: torch.Generator, below: int) -> int:
    """Return a random integer from 0 to `below - 1`."""
    return int(torch.randint(below, (), generator=generator))


def distinct(make: Callable[[], Hashable | None], count: int, attempts: int) -> list:
    """Call `make` until it has returned `count` different values other than None, at most `attempts` times."""
    values: dict[Hashable, None] = {}
    for _ in range(attempts):
        value = make()
        if value is not None:
            values[value] = None
        if len(values) == count:
            break
    return list(values)
