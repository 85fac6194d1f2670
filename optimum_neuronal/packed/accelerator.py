"""Find the kernels for packed weights on GPUs and other accelerators."""

import functools
import os
from importlib import import_module
from types import ModuleType

import torch

from ..common.notes import get_logger
from ..common.torch_state import may_use_triton, triton_problem
from ..native.library import TORCH, VARIABLE


logger = get_logger(__name__)


@functools.cache
def find_kernels(device: torch.device) -> ModuleType | None:
    """Return the module with Triton kernels, or None with a warning if they don't work on a device."""
    is_host = device.type in ("cpu", "meta") and not may_use_triton(device)
    if is_host or os.environ.get(VARIABLE) == TORCH:
        return None

    def attempt() -> None:  # so that an error shows here and not in the middle of a model
        import_module(".triton_kernels", __package__).try_out(device)

    reason = triton_problem(device, attempt)
    if reason is None:
        return import_module(".triton_kernels", __package__)
    logger.warning(
        f"Packed weights on {device} run without kernels, which is slow: {reason}. torch makes every weight dense for "
        "each token. Call optimum_neuronal.densify(model) to compute with dense weights."
    )
    return None
