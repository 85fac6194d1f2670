"""Products with weights of every layout, by torch's operations; and the kernels for matrices in 8 bits."""

from itertools import product

import pytest
import torch
from coded import coded_tensors, make_coded
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import check_rows_alone, kernels, multiply_by_blocks
from profiles import examples
from weights import TOLERANCE, all_rows, bits, error, finite, make_int8, packed, sparse

from optimum_neuronal.formats.codebooks import BITS
from optimum_neuronal.formats.int8_weight import Int8Weight
from optimum_neuronal.inference import coded_ops, int8_ops, ops, torch_fallback
from optimum_neuronal.inference.activations import to_int8
from optimum_neuronal.inference.coded_rows import CodedRows
from optimum_neuronal.inference.int8_rows import Int8Rows
from optimum_neuronal.inference.packed_rows import DTYPES, PackedRows
from optimum_neuronal.native.library import Kernel, find_kernel


UNPACK = {PackedRows: "unpack", CodedRows: "unpack_coded", Int8Rows: "unpack_int8"}


def rounds_inputs(rows) -> bool:
    return getattr(rows, "activations", "bf16") == "int8"


def test_as_dense():
    for dtype, lead, with_bias in product(DTYPES, [(), (1,), (3,), (2, 5), (40,), (0,)], [False, True]):
        x, bias = finite((*lead, 133), dtype, 1), finite((37,), dtype, 1) if with_bias else None
        for rows in all_rows(37, 133, dtype):
            y = rows.linear(x, bias)
            assert y.shape == (*lead, 37) and y.dtype == dtype
            most = 3e-2 if rounds_inputs(rows) else TOLERANCE[dtype]
            assert not y.numel() or error(y, x, rows.unpack(), bias) < most


def test_many_rows_of_x_are_multiplied_block_by_block(monkeypatch):
    """Inputs are not rounded then."""
    x = finite((40, 133), torch.float32, 1, 2)
    for value_bits, bias in product(BITS, (None, finite((37,), torch.float32, 1))):
        for rows in all_rows(37, 133, value_bits=value_bits):
            with monkeypatch.context() as patch:
                y = multiply_by_blocks(patch, UNPACK[type(rows)], rows.linear, x, bias)
            assert error(y, x, rows.unpack(), bias) < 1e-5


def test_few_rows_of_x_unpack_nothing(monkeypatch):
    if find_kernel() is None:
        pytest.skip("there are no compiled kernels")
    monkeypatch.setattr(Kernel, "unpack", lambda *_args: pytest.fail("unpacked"))
    weight = finite((37, 133), torch.float32)
    for count in range(1, ops.MAX_FUSED_ROWS + 1):
        x = finite((count, 133), torch.float32, 1, 2)
        assert error(ops.packed_linear(x, *packed(weight)), x, weight) < 1e-5


def test_without_kernels(monkeypatch):
    """With torch alone the results are close, and equal to the bit where sums are exact."""
    x = torch.randn(5, 300)
    for rows in all_rows(37, 300, value_bits=3):
        half = rows.converted(None, torch.bfloat16)
        found, dense, in_bfloat16 = rows.linear(x), rows.unpack(), half.unpack()
        with monkeypatch.context() as patch:
            for module in (ops, coded_ops, int8_ops):
                patch.setattr(module, "find_kernel", lambda: None)
            expected = rows.linear(x)
            assert torch.equal(rows.unpack(), dense) and torch.equal(half.unpack(), in_bfloat16)
        atol = 1e-4 if isinstance(rows, Int8Rows) else 1e-5
        assert torch.equal(found, expected) if rounds_inputs(rows) else torch.allclose(found, expected, atol=atol)


def test_unpacking_is_bit_equal():
    for dtype in DTYPES:
        weight = sparse((19, 77), dtype)
        assert torch.equal(bits(ops.unpack_rows(*packed(weight), 77)), bits(weight))


def test_what_is_not_finite_stays_in_its_row():
    for special in [float("nan"), float("inf")]:
        rows, x = Int8Rows.of(make_int8(7, 300)), torch.randn(3, 300)
        plain = rows.linear(x)
        x[1, 200] = special
        y = rows.linear(x)
        assert y[1].isnan().all() and torch.equal(y[[0, 2]], plain[[0, 2]])


def test_what_does_not_fit_is_refused():
    x, values, codes = torch.zeros(1, 70), packed(finite((4, 70), torch.float32)), coded_tensors(make_coded(4, 70, 4))
    int8 = make_int8(4, 70)
    levels, scales = int8.levels, int8.scales.view(torch.int16)
    for multiply, cases in (
        (ops.packed_linear, (
            ((x.bfloat16(), *values), "x is torch.bfloat16 on cpu, but the weight torch.float32"),
            ((x[:, :5], *values), r"expected \[out, 8\]"),
            ((x, *values[:2], values[2][1:]), r"offsets of shape \[4\]"),
            ((x, *values, torch.zeros(3)), r"the bias has shape \[3\]: expected \[4\]"),
            ((x, values[0].t().contiguous().t(), *values[1:]), "not contiguous"),
            ((x, values[0].int(), *values[1:]), "expected torch.uint8"),
            ((torch.tensor(1.0), *values), "x has no dimension"),
        )),
        (coded_ops.coded_linear, (
            ((x, codes[0].int(), *codes[1:]), "bits of torch.int32"),
            ((x, codes[0], codes[1].to("meta"), *codes[2:]), "on meta: expected torch.uint8"),
            ((x, *codes[:2], codes[2][1:], *codes[3:]), r"offsets of torch.int64 and shape \[4\]"),
            ((x, *codes[:3], codes[3].bfloat16(), codes[4]), "scales of torch.bfloat16"),
            ((x, *codes[:4], codes[4][:5]), "a table of 5 levels: expected 4, 8, 16 or 0"),
            ((x.double(), *codes), "cannot be computed in torch.float64"),
            ((x[:, :5], *codes), "for 5 columns"),
            ((torch.zeros(1, 300), *codes), "for 300 columns"),
            ((x, *codes, torch.zeros(3)), r"the bias is torch.float32 of shape \[3\]"),
            ((torch.tensor(1.0), *codes), "x has no dimension"),
        )),
        (int8_ops.int8_linear, (
            ((torch.zeros(1, 71), levels, scales), "have levels of"),
            ((x, levels.float(), scales), "levels of torch.float32"),
            ((x, levels, scales[:, :0]), "have scales of"),
            ((x, levels, scales, torch.zeros(3)), "the bias is"),
            ((x.double(), levels, scales), "cannot be computed in torch.float64"),
            ((x.to("meta"), levels, scales), "x is on meta"),
            ((torch.tensor(1.0), levels, scales), "no dimension"),
        )),
        (ops.unpack_rows, (((*values, 300), "for 300 columns"),)),
        (coded_ops.unpack_coded, (((*codes, 70, torch.int8), "cannot be computed in torch.int8"),)),
    ):  # fmt: skip
        for arguments, message in cases:
            with pytest.raises(ValueError, match=message):
                multiply(*arguments)


def test_torch_compile_keeps_its_graph_whole():
    x = finite((2, 64), torch.float32, 1)
    values, codes = packed(finite((16, 64), torch.float32)), coded_tensors(make_coded(16, 64, 4))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x):
        of_values = ops.packed_linear(x + 1, *values) + ops.unpack_rows(*values, 64).sum()
        return of_values, coded_ops.coded_linear(x + 1, *codes) + coded_ops.unpack_coded(*codes, 64, x.dtype).sum()

    weights = ops.unpack_rows(*values, 64), coded_ops.unpack_coded(*codes, 64, torch.float32)
    for found, weight in zip(compiled(x), weights, strict=True):
        assert torch.allclose(found, torch.nn.functional.linear(x + 1, weight) + weight.sum(), atol=1e-5)


def test_torch_knows_the_operations_well():
    values, codes = packed(finite((4, 70), torch.float32)), coded_tensors(make_coded(4, 70, 4))
    rows, x, known = Int8Rows.of(make_int8(4, 70)), torch.randn(2, 70), torch.ops.optimum_neuronal
    for operation, arguments in (
        (known.packed_linear, (x, *values, None)),
        (known.unpack_rows, (*values, 70)),
        (known.coded_linear, (x, *codes, None, True)),
        (known.unpack_coded, (*codes, 70, torch.float32)),
        (known.int8_linear, (x, rows.levels, rows.scales, None, True)),
        (known.unpack_int8, (rows.levels, rows.scales, torch.float16)),
    ):
        torch.library.opcheck(operation.default, arguments)


def test_inputs_are_rounded_by_groups():
    x = torch.zeros(1, 130)
    x[0, :4] = torch.tensor([254.0, 1.0, 3.0, -5.0])  # in units of 2: halves, to even
    x[0, 129] = -1e-3
    numbers, scales = to_int8(x)
    assert numbers.shape == (1, 2, 128) and scales.shape == (1, 2)
    assert numbers[0, 0, :4].tolist() == [127, 0, 2, -2] and numbers[0, 1, 1] == -127
    assert scales[0, 0] == 2 and scales[0, 1] == torch.tensor(1e-3) / 127


@examples(30)
@given(
    out=st.integers(1, 40),
    columns=st.integers(1, 300) | st.sampled_from([64, 128, 1024, 1100, 2200]),
    count=st.integers(1, 8),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_kernels_for_8_bits(out, columns, count, dtype, with_bias, seed):
    """With floats close to float64; with bytes the same to the bit as in torch, whose sums are exact."""
    int8 = make_int8(out, columns, dtype, seed)
    tensors = (int8.levels, int8.scales.view(torch.int16))
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    bias = torch.randn(out).to(dtype) if with_bias else None
    weight = int8.unpack()
    exact = Int8Weight(int8.levels, int8.scales, torch.float32).unpack().double()
    expected = torch.nn.functional.linear(x.double(), exact, None if bias is None else bias.double())
    by_bytes = torch_fallback.int8_linear(x, *tensors, bias, True)
    assert torch.equal(torch_fallback.unpack_int8(*tensors, dtype), weight)
    for kernel in kernels():
        y = kernel.int8_linear(x, *tensors, bias, False)
        assert y.dtype == dtype and torch.allclose(y.double(), expected, TOLERANCE[dtype], 1e-4), kernel.name
        assert torch.equal(kernel.int8_linear(x, *tensors, bias, True), by_bytes), kernel.name
        dense = torch.full((out, columns), 7, dtype=dtype)
        kernel.unpack_int8(*tensors, dense)
        assert torch.equal(dense, weight), kernel.name


def test_neither_threads_nor_other_rows_change_a_bit():
    rows = Int8Rows.of(make_int8(701, 1000))
    for int8 in (False, True):
        check_rows_alone("int8_linear", torch.randn(8, 1000), rows.levels, rows.scales, None, int8)
