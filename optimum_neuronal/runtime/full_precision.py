"""Matrix products in float32 as such: no TensorFloat-32, no bfloat16 inside."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """While the context lasts, float32 matrix products have float32's precision, whatever the user has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
