"""The operations where tensors lie on no CPU: by Triton if it works on that device, else by torch, with a warning."""

import functools
import os
from types import ModuleType

import torch

from ..native.library import TORCH, VARIABLE
from ..system.notes import get_logger
from . import torch_fallback


logger = get_logger(__name__)

TRITON_DEVICES = ("cuda", "xpu")  # torch calls AMD's "cuda" too


def packed_linear(
    x: torch.Tensor, bits: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ W.T + bias` on the device of `x`. For arguments and result see `inference.ops`."""
    return kernels(values.device).packed_linear(x, bits, values, offsets, bias)


def unpack_rows(bits: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, columns: int) -> torch.Tensor:
    """The dense weight, bit-equal, on the device of `values`. For arguments and result see `inference.ops`."""
    return kernels(values.device).unpack_rows(bits, values, offsets, columns)


@functools.cache
def kernels(device: torch.device) -> ModuleType:
    """`triton_kernels` where Triton is installed and works, else `torch_fallback`; found out once for every device."""
    if os.environ.get(VARIABLE) == TORCH:
        return torch_fallback
    if device.type not in TRITON_DEVICES:
        return _without(device, f"there are none for {device.type}")
    try:
        from . import triton_kernels
    except ImportError as error:
        return _without(device, f"they need Triton (pip install triton), which cannot be imported: {error}")
    try:
        _try(triton_kernels, device)
    except Exception as error:  # whatever a compiler, a driver or an unknown device raise
        return _without(device, f"Triton does not work there: {type(error).__name__}: {error}")
    return triton_kernels


def coded_kernels(device: torch.device) -> ModuleType:
    """As `kernels`, for values of few bits: `triton_coded` or `torch_fallback`."""
    if kernels(device) is torch_fallback:
        return torch_fallback
    from . import triton_coded

    return triton_coded


def _try(module: ModuleType, device: torch.device) -> None:
    """Compiles and starts the smallest work, so that what is missing shows here and not in the midst of a model."""
    bits = torch.zeros(1, 8, dtype=torch.uint8, device=device)
    module.unpack_rows(bits, torch.zeros(1, device=device), torch.zeros(2, dtype=torch.int64, device=device), 1)


def _without(device: torch.device, reason: str) -> ModuleType:
    logger.warning(
        f"Packed weights on {device} are computed with slowly, without kernels: {reason}. torch's own operations unpack "
        "every weight anew for every token. densify(model) makes it a dense model again."
    )
    return torch_fallback
