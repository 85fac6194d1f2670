"""Notes and warnings to users, shown as transformers' own are."""

import logging as python_logging

from transformers.utils import logging


def get_logger(name: str) -> python_logging.Logger:
    """Return a module's logger, a child of transformers', so that `TRANSFORMERS_VERBOSITY` applies."""
    return logging.get_logger(f"transformers.{name}")
