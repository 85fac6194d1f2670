"""Matrix products in float32 as such: no TensorFloat-32, no bfloat16 inside."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """While the context lasts, float32 matrix products have float32's precision, whatever the user has set.

    It may have been set for all backends (`torch.set_float32_matmul_precision`) or for one
    (`torch.backends.cuda.matmul.fp32_precision`): both are put back.
    """
    before = _for_all()
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


def _for_all() -> str | None:
    """What is set for all backends; None where one was set otherwise, which torch then refuses to tell."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
