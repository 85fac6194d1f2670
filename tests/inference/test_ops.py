from itertools import product

import pytest
import torch
from kernel_checks import multiply_by_blocks
from test_packed_rows import bits, sparse

from optimum_neuronal.formats.packed import PackedWeight
from optimum_neuronal.inference import ops
from optimum_neuronal.inference.packed_rows import DTYPES, PackedRows
from optimum_neuronal.native.library import Kernel, find_kernel


TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


def finite(shape, dtype, density=0.3, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return weight.masked_fill_(torch.rand(shape, generator=generator) >= density, 0).to(dtype)


def packed(weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = PackedRows.of(PackedWeight.pack(weight))
    return rows.bits, rows.values, rows.offsets


def error(y, x, weight, bias=None) -> float:
    """Largest error relative to the largest magnitude that float64 gives."""
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((y.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def test_as_dense():
    for dtype, lead, with_bias in product(DTYPES, [(), (1,), (3,), (2, 5), (40,), (0,)], [False, True]):
        weight = finite((37, 133), dtype)
        x, bias = finite((*lead, 133), dtype, 1), finite((37,), dtype, 1) if with_bias else None
        y = ops.packed_linear(x, *packed(weight), bias)
        assert y.shape == (*lead, 37) and y.dtype == dtype
        assert not y.numel() or error(y, x, weight, bias) < TOLERANCE[dtype]


def test_many_rows_of_x_are_multiplied_block_by_block(monkeypatch):
    weight, x = finite((37, 133), torch.float32), finite((40, 133), torch.float32, 1, 2)
    for bias in (None, finite((37,), torch.float32, 1)):
        with monkeypatch.context() as patch:
            y = multiply_by_blocks(patch, "unpack", ops.packed_linear, x, *packed(weight), bias)
        assert error(y, x, weight, bias) < 1e-5


def test_few_rows_of_x_unpack_nothing(monkeypatch):
    if find_kernel() is None:
        pytest.skip("there are no compiled kernels")
    monkeypatch.setattr(Kernel, "unpack", lambda *_args: pytest.fail("unpacked"))
    weight = finite((37, 133), torch.float32)
    for count in range(1, ops.MAX_FUSED_ROWS + 1):
        x = finite((count, 133), torch.float32, 1, 2)
        assert error(ops.packed_linear(x, *packed(weight)), x, weight) < 1e-5


def test_unpacking_is_bit_equal():
    for dtype in DTYPES:
        weight = sparse((19, 77), dtype)
        assert torch.equal(bits(ops.unpack_rows(*packed(weight), 77)), bits(weight))


def test_what_does_not_fit_is_refused():
    parts, x = packed(finite((4, 70), torch.float32)), torch.zeros(1, 70)
    for wrong, message in (
        ((x.bfloat16(), *parts), "x is torch.bfloat16 on cpu, but the weight torch.float32"),
        ((x[:, :5], *parts), r"expected \[out, 8\]"),
        ((x, parts[0], parts[1], parts[2][1:]), r"offsets of shape \[4\]"),
        ((x, *parts, torch.zeros(3)), r"the bias has shape \[3\]: expected \[4\]"),
        ((x, parts[0].t().contiguous().t(), *parts[1:]), "not contiguous"),
        ((x, parts[0].int(), *parts[1:]), "expected torch.uint8"),
        ((torch.tensor(1.0), *parts), "x has no dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.packed_linear(*wrong)
    with pytest.raises(ValueError, match="for 300 columns"):
        ops.unpack_rows(*parts, 300)


def test_torch_compile_keeps_its_graph_whole():
    weight = finite((16, 64), torch.float32)
    parts, x = packed(weight), finite((2, 64), torch.float32, 1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x):
        return ops.packed_linear(x + 1, *parts) + ops.unpack_rows(*parts, 64).sum()

    assert torch.allclose(compiled(x), torch.nn.functional.linear(x + 1, weight) + weight.sum(), atol=1e-5)


def test_torch_knows_the_operations_well():
    parts = packed(finite((4, 70), torch.float32))
    torch.library.opcheck(torch.ops.optimum_neuronal.packed_linear, (torch.randn(2, 70), *parts, None))
    torch.library.opcheck(torch.ops.optimum_neuronal.unpack_rows, (*parts, 70))
