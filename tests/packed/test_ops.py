"""Products with packed weights as modules and torch's graphs compute them."""

from itertools import product

import pytest
import torch
from kernel_checks import check_product, finite

from optimum_neuronal.native.library import Kernel, find_kernel
from optimum_neuronal.packed import ops
from optimum_neuronal.packed.packed_weight import DTYPES, MAX_FUSED_ROWS, PackedWeight


known = torch.ops.optimum_neuronal


def test_as_dense():
    for dtype, lead, with_bias in product(DTYPES, [(), (1,), (3,), (2, 5), (40,), (0,)], [False, True]):
        x, bias = finite((*lead, 133), dtype, 1), finite((37,), dtype, 1) if with_bias else None
        dense = finite((37, 133), dtype)
        y = ops.sparse_linear(PackedWeight.pack(dense), x, bias)
        assert y.shape == (*lead, 37)
        check_product(y.view(-1, 37), x.view(-1, 133), dense, bias)


@pytest.mark.skipif(find_kernel() is None, reason="there are no compiled kernels")
def test_many_rows_of_x_are_multiplied_block_by_block_and_few_at_once(monkeypatch):
    seen, to_dense = [], Kernel.to_dense
    monkeypatch.setattr("optimum_neuronal.packed.packed_weight.SCRATCH_ROWS", 64)
    monkeypatch.setattr(Kernel, "to_dense", lambda self, *args: seen.append(len(args[-1])) or to_dense(self, *args))
    dense, bias = finite((150, 133)), finite((150,), density=1)
    for count in (*range(1, MAX_FUSED_ROWS + 1), 40):
        assert not seen, "few rows unpack nothing"
        x = finite((count, 133), density=1, seed=2)
        check_product(ops.sparse_linear(PackedWeight.pack(dense), x, bias), x, dense, bias)
    assert seen == [64, 64, 22], "never unpacked as a whole"


def test_what_does_not_fit_raises():
    x, weight = torch.zeros(1, 70), PackedWeight.pack(finite((4, 70)))
    for inputs, bias, message in (
        (x.bfloat16(), None, "x is torch.bfloat16 on cpu, but the weight torch.float32"),
        (x[:, :5], None, r"x has shape \[1, 5\]: expected \(..., 70\)"),
        (torch.tensor(1.0), None, "x has shape"),
        (x.to("meta"), None, "x is torch.float32 on meta"),
        (x, torch.zeros(3), r"the bias is torch.float32 of shape \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.sparse_linear(weight, inputs, bias)
    mask, values, offsets = weight.tensors()
    for tensors, message in (
        ((mask.int(), values, offsets), "its mask have dtype torch.int32"),
        ((mask.t().contiguous().t(), values, offsets), "not contiguous"),
        ((mask, values.bfloat16(), offsets), "but the weight torch.bfloat16"),
        ((mask, values.double(), offsets), "its dtype is torch.float64: expected one of torch.bfloat16"),
        ((mask, values, offsets[1:]), r"expected torch.uint8 and \[3, 16\]"),
        ((values, mask, offsets, offsets), r"its index have dtype torch.uint8 and shape \[4, 16\]"),
    ):
        with pytest.raises(ValueError, match=message):
            known.packed_linear(x, tensors, None)


def test_torch_knows_the_operations_well():
    torch.library.opcheck(
        known.packed_linear.default, (torch.randn(2, 70), PackedWeight.pack(finite((4, 70))).tensors(), None)
    )


def test_derivatives():
    """The gradient that autograd takes is that of the dense product. A second one raises an error; it is never zero."""
    dense, x = finite((37, 133)), torch.randn(40, 133, requires_grad=True)
    y = ops.sparse_linear(PackedWeight.pack(dense), x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    check_product(gradient.detach(), 2 * y.detach(), dense.T)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(gradient.square().sum(), x)
