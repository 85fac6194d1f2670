"""Checks that the kernels of every format of weights pass."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optimum_neuronal.native.build import BuildError
from optimum_neuronal.native.library import Kernel, find_library
from optimum_neuronal.packed.formats.quantized import QuantizedWeight


ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}
FAR = 2**31 + 5  # more than 31 bits number


def kernels() -> list[Kernel]:
    """Return all compiled kernels that this processor can run."""
    found = find_library()
    if isinstance(found, BuildError):
        pytest.skip(str(found))
    return [Kernel(found, name) for name in found.kernels]


def nearest(shape, bits=4, dtype=torch.float32, seed=0, steps=False) -> QuantizedWeight:
    """Return normal numbers, rounded to the nearest levels."""
    generator = torch.Generator().manual_seed(seed)
    weight = QuantizedWeight.nearest(torch.randn(shape, generator=generator).to(dtype), bits)
    return replace(weight, steps=(torch.rand(shape[-1], generator=generator) + 0.5).bfloat16()) if steps else weight


def check_rows_alone(multiply: Callable[[Kernel, torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Neither the number of threads nor the other rows of x change a bit of a kernel's product."""
    before = torch.get_num_threads()
    for kernel in kernels():
        results = []
        try:
            for threads in (1, 2, (os.cpu_count() or 1) + 3):
                torch.set_num_threads(threads)
                results.append(multiply(kernel, x))
        finally:
            torch.set_num_threads(before)
        results.append(torch.cat([multiply(kernel, row[None]) for row in x]))
        assert all(torch.equal(bits(result), bits(results[0])) for result in results), kernel.name


def check_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """`y`, of x's dtype, is `x @ weight.T + bias` as float64 gives it, but for one rounding and float32's sums."""
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    off = (y.double() - exact).abs() - ROUNDING[x.dtype] * exact.abs() - 1e-6 * size
    assert y.dtype == x.dtype and y.shape == exact.shape and off.max() <= 1e-7


def far_behind(values: torch.Tensor, folder: Path) -> torch.Tensor:
    """Return `FAR` values and then these, in a file that holds nothing but the last ones."""
    many = torch.from_file(str(folder / "values"), shared=True, size=FAR + len(values), dtype=values.dtype)
    many[FAR:] = values
    return many


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
