"""Load the compiled kernels, choose the fastest that the processor can run, and call them.

The environment variable OPTIMUM_NEURONAL_KERNEL forces one: a name of `KERNELS`, or "torch" for none.
"""

import ctypes
import os
import platform
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

# Before the library: both then share one OpenMP runtime, torch's.
import torch
import transformers
from torch import Tensor

from .. import __version__
from ..common.notes import get_logger
from .build import BuildError, cached_library, installed_library


logger = get_logger(__name__)

VARIABLE = "OPTIMUM_NEURONAL_KERNEL"
# As in common.h, the slowest first.
KERNELS = {"portable": 0, "avx2": 1, "avx512": 2, "avx512_vbmi2": 3, "avx512_bf16": 4}
TORCH = "torch"
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
FUNCTIONS = {
    "neuronal_supports": [_INT],
    "neuronal_multiply": [
        _INT, _INT, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _INT,
    ],
    "neuronal_unpack": [_INT, _INT, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _INT],
}  # fmt: skip


class Kernel:
    """The kernels of one instruction set in `KERNELS`, for tensors on the CPU, which the caller checks.

    They use as many threads as torch.
    """

    def __init__(self, functions: ctypes.CDLL, name: str):
        self.name, self._code, self._functions = name, KERNELS[name], functions

    def multiply(self, x: Tensor, mask: Tensor, values: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x @ W.T + bias`: x (count, in), result (count, out). All tensors are contiguous and on the CPU."""
        y = x.new_empty(x.shape[0], mask.shape[0])
        _check(
            self._functions.neuronal_multiply(
                self._code, DTYPES[values.dtype], x.data_ptr(), x.shape[0], mask.data_ptr(), values.data_ptr(),
                values.shape[0], offsets.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
                mask.shape[0], x.shape[1], torch.get_num_threads(),
            )
        )  # fmt: skip
        return y

    def to_dense(self, mask: Tensor, values: Tensor, offsets: Tensor, dense: Tensor) -> None:
        """Fill `dense`, shape (rows, columns), from the mask of these rows, their offsets (rows + 1) and all `values`."""
        _check(
            self._functions.neuronal_unpack(
                self._code, values.element_size(), mask.data_ptr(), values.data_ptr(), values.shape[0],
                offsets.data_ptr(), dense.data_ptr(), dense.shape[0], dense.shape[1], torch.get_num_threads(),
            )
        )  # fmt: skip


def _check(result: int) -> None:
    if result != 0:
        raise MemoryError("no memory for the activations") if result == 2 else RuntimeError(f"kernel error {result}")


def _load(path: Path) -> dict[str, Kernel]:
    """Return the kernels in a compiled file that this processor can run, by name, the slowest first."""
    functions = ctypes.CDLL(str(path))
    for name, arguments in FUNCTIONS.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, _INT
    return {name: Kernel(functions, name) for name, code in KERNELS.items() if functions.neuronal_supports(code)}


@lru_cache(maxsize=1)
def compiled_kernels() -> dict[str, Kernel] | BuildError:
    """Return the kernels of the installation or the user's cache by name, or the error that explains why it has none."""
    with suppress(OSError):  # missing, or compiled for another system
        return _load(installed_library())
    try:
        return _load(cached_library())
    except BuildError as error:
        return error
    except OSError as error:
        return BuildError(f"the compiled kernels cannot be loaded: {error}")


@lru_cache(maxsize=1)
def find_kernel() -> Kernel | None:
    """Return the kernels to compute with, or None for torch, with a warning unless the variable asks for it.

    Raise `ValueError` if the variable names others.
    """
    forced = os.environ.get(VARIABLE)
    if forced == TORCH:
        return None
    kernels = compiled_kernels()
    if isinstance(kernels, BuildError):
        if forced:
            raise ValueError(f"{VARIABLE} is {forced!r}, but there are no compiled kernels: {kernels}") from kernels
        logger.warning(
            f"There are no compiled kernels for packed weights: {kernels}. torch takes over, and needs about 30 times as long "
            "for each token as with dense weights. Install a C compiler, such as gcc, or densify the model."
        )
        return None
    if forced and forced not in kernels:
        known = ", ".join((*kernels, TORCH))
        raise ValueError(f"{VARIABLE} is {forced!r}: expected one of {known}, which this processor can run")
    return kernels[forced or list(kernels)[-1]]


def describe_environment() -> dict[str, Any]:
    """Return versions, processor, accelerators and kernels, JSON-serializable. Compile the kernels if they are missing."""
    kernels = compiled_kernels()
    try:
        kernel = find_kernel()
        used = kernel.name if kernel else f"{TORCH}: packed weights save memory, but take about 30 times as long"
    except ValueError as error:  # what the environment variable forces
        used = f"none: {error}"
    return {
        "optimum_neuronal": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor_name(),
        "threads": torch.get_num_threads(),
        "accelerator": str(torch.accelerator.current_accelerator(check_available=True) or "none"),
        "kernel in use": used,
        "kernels that run here": f"none: {kernels}" if isinstance(kernels, BuildError) else ", ".join(kernels),
    }


def _processor_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()
