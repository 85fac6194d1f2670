"""Notes and warnings to users, shown as transformers' own are."""

import logging as python_logging

from transformers.utils import logging


def get_logger(name: str) -> python_logging.Logger:
    """Return the logger of a module of this package, below transformers', so that `TRANSFORMERS_VERBOSITY` governs it."""
    return logging.get_logger(f"transformers.{name}")
