"""The device to compute on, and the precision of matrix products."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def default_device() -> torch.device:
    """Return the device to compute on if the user names none: the accelerator, or the CPU."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 matrix products in float32: without TensorFloat-32 or bfloat16 inside, whatever the user has set.

    The user may have set a precision for all backends (`torch.set_float32_matmul_precision`) or for one
    (`torch.backends.cuda.matmul.fp32_precision`): both are restored.
    """
    before = _precision_of_all()
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    own = [backend.fp32_precision for backend in backends]
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        for backend, precision in zip(backends, own):
            backend.fp32_precision = precision


def _precision_of_all() -> str | None:
    """Return the precision set for all backends, or None if one backend differs: torch then raises."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
