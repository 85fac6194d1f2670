"""Computing with packed weights on GPUs and other accelerators: by Triton's kernels where these work, else in plain torch."""

import functools
import os
from importlib import import_module
from types import ModuleType

import torch

from ..formats.packed_matrix import PackedMatrix
from ..formats.sparse import SparseWeight
from ..native.library import TORCH, VARIABLE
from ..system.notes import get_logger


logger = get_logger(__name__)

TRITON_DEVICES = ("cuda", "xpu")  # torch calls AMD's "cuda" too
MODULES = {"sparse": ".triton_sparse", "quantized": ".triton_quantized"}  # format -> module with `linear` and `unpack`


def linear(matrix: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ W.T + bias`, as [`PackedMatrix.linear`], on the device of `x`."""
    kernels = find_kernels(matrix.name, x.device)
    return matrix.linear(x, bias) if kernels is None else kernels.linear(matrix, x, bias)


def unpack(matrix: PackedMatrix) -> torch.Tensor:
    """Return the dense weight, on its device."""
    kernels = find_kernels(matrix.name, matrix.device)
    return matrix.unpack() if kernels is None else kernels.unpack(matrix)


def find_kernels(format: str, device: torch.device) -> ModuleType | None:
    """Return the module with a format's kernels for a device; None where torch computes."""
    return import_module(MODULES[format], __package__) if format in MODULES and _has_triton(device) else None


@functools.cache
def _has_triton(device: torch.device) -> bool:
    """Return True where Triton is installed and works; found out once for every device."""
    if os.environ.get(VARIABLE) == TORCH:
        return False
    if device.type not in TRITON_DEVICES:
        return _warn(device, f"there are none for {device.type}")
    try:
        _try(import_module(MODULES["sparse"], __package__), device)
    except ImportError as error:
        return _warn(device, f"they need Triton (pip install triton), which cannot be imported: {error}")
    except Exception as error:  # whatever a compiler, a driver or an unknown device raise
        return _warn(device, f"Triton does not work there: {type(error).__name__}: {error}")
    return True


def _try(module: ModuleType, device: torch.device) -> None:
    """Compile and start the smallest work, so that what is missing shows here and not in the midst of a model."""
    module.unpack(SparseWeight.pack(torch.zeros(1, 1, device=device)))


def _warn(device: torch.device, reason: str) -> bool:
    logger.warning(
        f"Packed weights on {device} are computed with slowly, without kernels: {reason}. torch's own operations unpack "
        "every weight anew for every token. densify(model) makes it a dense model again."
    )
    return False
