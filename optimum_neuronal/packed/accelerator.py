"""Computing with packed weights on GPUs and other accelerators: by Triton kernels where they work, else in plain torch."""

import functools
import os
from importlib import import_module
from types import ModuleType

import torch

from ..common.notes import get_logger
from ..native.library import TORCH, VARIABLE
from .formats.packed_matrix import PackedMatrix, multiply_by_blocks
from .formats.sparse import SparseWeight


logger = get_logger(__name__)

TRITON_DEVICES = ("cuda", "xpu")  # torch calls AMD's "cuda" too
MODULES = {"sparse": ".triton_sparse", "quantized": ".triton_quantized"}  # format -> module with `multiply` and `fill`
MAX_FUSED_ROWS = 8  # of x that kernels multiply with packed rows; more are multiplied with unpacked ones
SCRATCH = 8192  # rows that are unpacked at a time: 64 MiB of 4096 columns in bfloat16; a multiple of 64


def linear(matrix: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ W.T + bias`, as [`PackedMatrix.linear`], on the device of `x`."""
    kernels = find_kernels(matrix.name, x.device)
    if kernels is None:
        return matrix.linear(x, bias)
    if len(x) <= MAX_FUSED_ROWS:
        return kernels.multiply(matrix, x, bias)

    def fill(block: slice, dense: torch.Tensor) -> None:
        kernels.fill(matrix.window(block.start, block.stop), dense)

    return multiply_by_blocks(x, matrix.row_count, bias, fill, SCRATCH)


def unpack(matrix: PackedMatrix) -> torch.Tensor:
    """Return the dense weight, on its device."""
    kernels = find_kernels(matrix.name, matrix.device)
    if kernels is None:
        return matrix.unpack()
    dense = torch.empty(matrix.row_count, matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    kernels.fill(matrix, dense)
    return dense.view(matrix.shape)


def find_kernels(format: str, device: torch.device) -> ModuleType | None:
    """Return the module with a format's kernels for a device; None where torch computes."""
    return import_module(MODULES[format], __package__) if format in MODULES and _has_triton(device) else None


@functools.cache
def _has_triton(device: torch.device) -> bool:
    """Return True where Triton is installed and works; found out once for every device."""
    if os.environ.get(VARIABLE) == TORCH:
        return False
    reason = f"there are none for {device.type}"
    try:  # on the smallest weight, so that an error shows here and not in the middle of a model
        if device.type in TRITON_DEVICES:
            module, dense = import_module(MODULES["sparse"], __package__), torch.zeros(1, 1, device=device)
            module.fill(SparseWeight.pack(dense), dense)
            return True
    except ImportError as error:
        reason = f"they need Triton (pip install triton), which cannot be imported: {error}"
    except Exception as error:  # whatever a compiler, a driver or an unknown device raise
        reason = f"Triton does not work there: {type(error).__name__}: {error}"
    logger.warning(
        f"Packed weights on {device} run without kernels, which is slow: {reason}. torch unpacks every weight for "
        "each token. Call optimum_neuronal.densify(model) to compute with dense weights."
    )
    return False
