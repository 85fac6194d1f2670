"""Random states that a call leaves as they were."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch (on CPU and accelerators) when the context ends."""
    python, arrays = random.getstate(), np.random.get_state()
    kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cuda"
    try:
        with torch.random.fork_rng(device_type=kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
