"""Notes, warnings and progress, shown as transformers shows its own."""

import logging as python_logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm.auto import tqdm
from transformers.utils import logging

from .display import format_duration


SHORT = 10.0  # seconds: a quarter that ends earlier gets no line

Item = TypeVar("Item")


def get_logger(name: str) -> python_logging.Logger:
    """Return a module's logger, a child of transformers', so that `TRANSFORMERS_VERBOSITY` applies."""
    return logging.get_logger(f"transformers.{name}")


def announce(text: str) -> None:
    """Write a line to the log of a long task, unless its progress is hidden."""
    if logging.is_progress_bar_enabled():
        tqdm.write(text, file=sys.stderr)  # above a bar


def progress(items: Sequence[Item], label: str, unit: str, announced: bool = True) -> Iterator[Item]:
    """Yield items while a bar with this label is shown. Without a terminal, write a line per quarter of a long loop.

    With `announced`, a line comes first.
    """
    if not logging.is_progress_bar_enabled():
        yield from items
        return
    if sys.stderr.isatty():
        yield from logging.tqdm(items, desc=label, unit=unit, leave=False)
        return
    if announced:
        announce(label)
    start = time.perf_counter()
    for done, item in enumerate(items, start=1):
        yield item
        seconds = time.perf_counter() - start
        if seconds > SHORT and 4 * done // len(items) > 4 * (done - 1) // len(items):
            left = f", {format_duration(seconds / done * (len(items) - done))} left" if done < len(items) else ""
            announce(f"{label}: {done / len(items):.0%} after {format_duration(seconds)}{left}")
