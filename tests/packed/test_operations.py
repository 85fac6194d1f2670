"""Products with packed matrices as modules and torch's graphs compute them."""

from itertools import product

import pytest
import torch
from weights import TOLERANCE, all_matrices, error, finite, quantized

from optimum_neuronal.native.library import Kernel, find_kernel
from optimum_neuronal.packed import ops
from optimum_neuronal.packed.formats.packed_matrix import DTYPES
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.formats.sparse import MAX_FUSED_ROWS, SparseWeight


known = torch.ops.optimum_neuronal


def tolerance(matrix, count) -> float:
    """Return how far a product may be off: kernels for codes round few inputs to whole numbers."""
    rounds = isinstance(matrix, QuantizedWeight) and count <= 16
    return max(TOLERANCE[matrix.dtype], (3e-2 if matrix.bits == 8 else 4e-3) if rounds else 0)


def test_as_dense():
    for dtype, lead, with_bias in product(DTYPES, [(), (1,), (3,), (2, 5), (40,), (0,)], [False, True]):
        x, bias = finite((*lead, 133), dtype, 1), finite((37,), dtype, 1) if with_bias else None
        for matrix in all_matrices(37, 133, dtype):
            y = ops.linear(matrix, x, bias)
            assert y.shape == (*lead, 37) and y.dtype == dtype
            assert not y.numel() or error(y, x, ops.unpack(matrix), bias) < tolerance(matrix, y.numel() // 37)


def test_many_rows_of_x_are_multiplied_block_by_block(monkeypatch):
    if find_kernel() is None:
        pytest.skip("there are no compiled kernels")
    x, seen, original = finite((40, 133), torch.float32, 1, 2), [], Kernel.unpack
    monkeypatch.setattr("optimum_neuronal.packed.formats.sparse.SCRATCH_ROWS", 64)
    monkeypatch.setattr(Kernel, "unpack", lambda self, *args: seen.append(len(args[-1])) or original(self, *args))
    for bias in (None, finite((150,), torch.float32, 1)):
        matrix = SparseWeight.pack(finite((150, 133), torch.float32))
        assert error(ops.linear(matrix, x, bias), x, matrix.unpack(), bias) < 1e-5
    assert max(seen[:3]) == 64, "never unpacked as a whole"


def test_few_rows_of_x_unpack_nothing(monkeypatch):
    if find_kernel() is None:
        pytest.skip("there are no compiled kernels")
    matrices = all_matrices(37, 133)
    dense = [matrix.unpack() for matrix in matrices]
    for name in ("unpack", "unpack_quantized"):
        monkeypatch.setattr(Kernel, name, lambda *_args: pytest.fail("unpacked"))
    for count in range(1, MAX_FUSED_ROWS + 1):
        x = finite((count, 133), torch.float32, 1, 2)
        for matrix, weight in zip(matrices, dense):
            assert error(ops.linear(matrix, x), x, weight) < tolerance(matrix, count)


def test_what_does_not_fit_raises():
    x, sparse, codes = torch.zeros(1, 70), SparseWeight.pack(finite((4, 70), torch.float32)), quantized(4, 70)
    for matrix in (sparse, codes):
        for inputs, bias, message in (
            (x.bfloat16(), None, "x is torch.bfloat16 on cpu, but the weight torch.float32"),
            (x[:, :5], None, r"x has shape \[1, 5\]: expected \(..., 70\)"),
            (torch.tensor(1.0), None, "x has shape"),
            (x.to("meta"), None, "x is torch.float32 on meta"),
            (x, torch.zeros(3), r"the bias is torch.float32 of shape \[3\]"),
        ):
            with pytest.raises(ValueError, match=message):
                ops.linear(matrix, inputs, bias)
    mask, values, offsets = sparse.tensors().values()
    of_codes, scales = codes.tensors().values()
    for format, tensors, rows, message in (
        ("sparse", [mask.int(), values, offsets], 4, "its mask have dtype torch.int32"),
        ("sparse", [mask.t().contiguous().t(), values, offsets], 4, "not contiguous"),
        ("sparse", [mask, values.bfloat16(), offsets], 4, "its values have dtype torch.bfloat16"),
        ("sparse", [mask], 4, "it has no values"),
        ("quantized", [of_codes, scales, scales], 4, "its steps have"),
        ("quantized", [of_codes, scales], 5, "its codes have|its scales have"),
        ("dense", [values], 4, "Unknown packed format 'dense'"),
    ):
        with pytest.raises(ValueError, match=message):
            known.packed_linear(x, format, tensors, rows, None)
    with pytest.raises(ValueError, match="its dtype is torch.float64: expected one of torch.bfloat16"):
        known.packed_linear(x.double(), "sparse", [mask, values, offsets], 4, None)


def test_torch_knows_the_operations_well():
    x = torch.randn(2, 70)
    for matrix in all_matrices(4, 70):
        tensors = list(matrix.tensors().values())
        torch.library.opcheck(known.packed_linear.default, (x, matrix.name, tensors, 4, None))


def test_derivatives():
    """The gradient that autograd takes is that of the dense product. A second one raises an error; it is never zero."""
    for matrix in all_matrices(37, 133):
        dense, x = matrix.unpack(), torch.randn(40, 133, requires_grad=True)
        (gradient,) = torch.autograd.grad(ops.linear(matrix, x).square().sum(), x, create_graph=True)
        assert error(gradient, 2 * x, dense.T @ dense) < 1e-5
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(gradient.square().sum(), x)
