"""Compute with packed weights on GPUs and other accelerators: by Triton kernels where they work, else in plain torch."""

import functools
import os
from importlib import import_module
from types import ModuleType

import torch

from ..common.device import may_use_triton, triton_problem
from ..common.notes import get_logger
from ..native.library import TORCH, VARIABLE
from .grouped_weight import GroupedWeight
from .packed_weight import PackedWeight
from .row_blocks import SCRATCH_ROWS, multiply_by_blocks


logger = get_logger(__name__)

MAX_FUSED_ROWS = 8  # rows of x up to which kernels multiply packed weights; for more, weights are unpacked
SCRATCH = 2**23  # elements that are unpacked at a time: 16 MiB in bfloat16, which caches of large GPUs hold


def arrange(weight: PackedWeight) -> PackedWeight | GroupedWeight:
    """Return a checked weight in the layout that its device computes with: grouped if Triton works there."""
    has_kernels = may_use_triton(weight.device) and find_kernels(weight.device) is not None
    return GroupedWeight.from_packed(weight) if has_kernels else weight


def linear(weight: PackedWeight | GroupedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ W.T + bias`, as [`PackedWeight.linear`], on the device of `x`."""
    kernels = find_kernels(x.device)  # warns if there are none
    if isinstance(weight, PackedWeight):
        return weight.linear(x, bias)
    if len(x) <= MAX_FUSED_ROWS:
        return kernels.multiply(weight, x, bias)

    def fill(block: slice, dense: torch.Tensor) -> None:
        kernels.fill(weight.window(block.start, block.stop), dense)

    rows = max(1, SCRATCH // max(1, weight.shape[1]) // SCRATCH_ROWS) * SCRATCH_ROWS
    return multiply_by_blocks(x, weight.row_count, bias, fill, rows)


def unpack(weight: GroupedWeight) -> torch.Tensor:
    """Return the dense weight, on its device."""
    dense = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    find_kernels(weight.device).fill(weight, dense)
    return dense


@functools.cache
def find_kernels(device: torch.device) -> ModuleType | None:
    """Return the module with Triton kernels, or None if they don't work on a device. Each device is tried once."""
    if os.environ.get(VARIABLE) == TORCH:
        return None

    def attempt() -> None:  # on the smallest weight, so that an error shows here and not in the middle of a model
        kernels, dense = import_module(".triton_kernels", __package__), torch.zeros(1, 1, device=device)
        kernels.fill(GroupedWeight.from_packed(PackedWeight.pack(dense)), dense)

    reason = triton_problem(device, attempt)
    if reason is None:
        return import_module(".triton_kernels", __package__)
    logger.warning(
        f"Packed weights on {device} run without kernels, which is slow: {reason}. torch unpacks every weight for "
        "each token. Call optimum_neuronal.densify(model) to compute with dense weights."
    )
    return None
