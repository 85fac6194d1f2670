"""What every packed format does: the same tests for all of them."""

import pytest
import torch
from kernel_checks import check_product
from weights import all_matrices

from optimum_neuronal.packed.formats.packed_matrix import FORMATS


@pytest.mark.parametrize("rows, columns", [(150, 70), (128, 64), (1, 1), (3, 200)])
def test_parts_of_rows_come_back(rows, columns):
    for matrix in all_matrices(rows, columns, torch.bfloat16):
        dense = matrix.unpack()
        matrix.check()
        assert dense.shape == (rows, columns) and dense.dtype == matrix.dtype
        bounds = sorted({0, 1, rows // 2, min(64, rows), rows})
        parts = [matrix.rows(first, last) for first, last in zip(bounds, bounds[1:])]
        for part, first, last in zip(parts, bounds, bounds[1:]):
            part.check()
            assert torch.equal(part.unpack(), dense[first:last])
            assert torch.equal(matrix.window(first, last).unpack(), dense[first:last])
        joined = type(matrix).joined(parts)
        joined.check()
        assert torch.equal(joined.unpack(), dense) and joined.shape == (rows, columns)
        assert type(matrix).joined([matrix]).tensors().keys() == matrix.tensors().keys()
        assert matrix.joins(parts[0]) and not matrix.joins(matrix.to(dtype=torch.float32))


def test_made_again_of_its_tensors_as_files_have_them():
    for matrix in all_matrices(70, 130, torch.float16):
        kind, stored = type(matrix), matrix.stored()
        assert all(name.startswith("packed_") for name in stored)
        again = kind.of_stored(stored, matrix.shape, matrix.dtype)
        again.check()
        assert torch.equal(again.unpack(), matrix.unpack()) and again.nbytes == matrix.nbytes
        assert FORMATS.get(matrix.name) is kind


def test_converted_and_applied():
    for matrix in all_matrices(9, 70):
        half = matrix.to(dtype=torch.float16)
        half.check()
        assert half.dtype == half.unpack().dtype == torch.float16
        assert torch.allclose(half.unpack().float(), matrix.unpack(), atol=1e-2, rtol=1e-3)
        weight = torch.ones(9, 70, dtype=torch.bfloat16)
        assert torch.equal(matrix.applied(weight), matrix.unpack().bfloat16()) and weight.eq(1).all()
        matrix.apply_to(weight)
        assert torch.equal(weight, matrix.unpack().bfloat16())


def test_without_kernels(monkeypatch):
    x = torch.randn(3, 130)
    for matrix in all_matrices(70, 130):
        found, dense = matrix.linear(x), matrix.unpack()
        with monkeypatch.context() as patch:
            for module in ("sparse", "quantized"):
                patch.setattr(f"optimum_neuronal.packed.formats.{module}.find_kernel", lambda: None)
            assert torch.equal(matrix.unpack(), dense)
            expected = matrix.linear(x)
        rounding = 2e-2 if getattr(matrix, "bits", None) == 8 else 3e-3
        assert (found - expected).abs().max() <= rounding * expected.abs().max()


@pytest.mark.parametrize("capability, dtype", [("AVX2", torch.float32), ("AVX512", torch.bfloat16)])
def test_many_rows_of_x_are_multiplied_in_the_dtype_that_is_fast(capability, dtype, monkeypatch):
    """Rounded once, to the dtype of x, either way; only products of float32 are fast without instructions for others."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    multiply, seen = torch.addmm, []
    monkeypatch.setattr(torch, "addmm", lambda *args, out: seen.append(args[2].dtype) or multiply(*args, out=out))
    x, bias = torch.randn(40, 130).bfloat16(), torch.randn(70).bfloat16()
    for matrix in all_matrices(70, 130, torch.bfloat16):
        check_product(matrix.linear(x, bias), x, matrix.unpack(), bias)
    assert set(seen) == {dtype}
