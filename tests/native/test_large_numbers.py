"""Inputs near the largest number: what is finite, whatever the order of its sum, is not infinite in any kernel."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_checks import check_product, kernels
from profiles import examples

from optimum_neuronal.packed import packed_weight
from optimum_neuronal.packed.packed_weight import PackedWeight


LARGEST = torch.finfo(torch.bfloat16).max


@examples(12)
@given(
    share=st.sampled_from([0.5, 1, 1e-3, 1e-5]),
    columns=st.sampled_from([1, 63, 128, 300, 1100]),
    count=st.integers(1, 8),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 100),
)
@example(share=0.5, columns=300, count=3, dtype=torch.bfloat16, seed=0)
def test_finite_products_stay_finite(share, columns, count, dtype, seed):
    """Of both signs, in the first row of x alone; other rows and small numbers beside large ones stay as exact."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, columns, generator=generator) * (0.1 / columns)
    weight[torch.rand(7, columns, generator=generator) < 0.5] = 0
    x = torch.randn(count, columns, generator=generator)
    x[0] = x[0].sign() * share * LARGEST
    packed, x = PackedWeight.pack(weight.to(dtype)), x.to(dtype)
    products = [(kernel.name, kernel.multiply(x, *packed.tensors(), None)) for kernel in kernels()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_weight, "find_kernel", lambda: None)
        products.append(("torch", packed.multiply(x)))
    for kernel, y in products:
        assert y.isfinite().all(), kernel
        check_product(y, x, packed.to_dense(), None)
