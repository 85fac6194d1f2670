"""Random sparse weights, and checks that products with them pass."""

from pathlib import Path

import pytest
import torch

from optimum_neuronal.native.build import BuildError
from optimum_neuronal.native.library import Kernel, compiled_kernels
from optimum_neuronal.packed.packed_weight import INTEGERS


ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}
FAR = 2**31 + 5  # more than 31 bits number


def kernels() -> list[Kernel]:
    """Return all compiled kernels that this processor can run."""
    found = compiled_kernels()
    if isinstance(found, BuildError):
        pytest.skip(str(found))
    return list(found.values())


def any_bits(shape, dtype=torch.float32, density=0.3, seed=0) -> torch.Tensor:
    """Return a weight of any bits, zero but for a share of its elements: NaN, infinity, subnormal numbers and -0.0 among them."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    weight = raw.view(-1).view(dtype).view(shape)
    weight.view(INTEGERS[dtype.itemsize])[torch.rand(shape, generator=generator) >= density] = 0
    if weight.numel():
        weight.view(-1)[0] = -0.0
    return weight


def finite(shape, dtype=torch.float32, density=0.3, seed=0) -> torch.Tensor:
    """Return normal numbers, zero but for a share of the elements."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return weight.masked_fill_(torch.rand(shape, generator=generator) >= density, 0).to(dtype)


def check_product(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, roundings: int = 1
) -> None:
    """`y`, of x's dtype, is `x @ weight.T + bias` as float64 gives it, but for so many roundings and float32's sums."""
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    off = (y.double() - exact).abs() - roundings * ROUNDING[x.dtype] * exact.abs() - 1e-6 * size
    assert y.dtype == x.dtype and y.shape == exact.shape and (off <= 1e-7).all()


def far_behind(values: torch.Tensor, folder: Path, far: int = FAR) -> torch.Tensor:
    """Return so many values and then these, in a file that holds nothing but the last ones."""
    many = torch.from_file(str(folder / str(values.dtype)), shared=True, size=far + len(values), dtype=values.dtype)
    many[far:] = values
    return many


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as whole numbers, of which NaN are equal too."""
    return tensor.view(INTEGERS[tensor.element_size()])
