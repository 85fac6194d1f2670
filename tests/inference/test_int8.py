"""Matrices in 8 bits: kernels, operations and rows."""

import dataclasses
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import check_rows_alone, kernels, multiply_by_blocks
from profiles import examples
from test_ops import error

from optimum_neuronal.formats.int8_weight import Int8Weight
from optimum_neuronal.inference import int8_ops, torch_fallback
from optimum_neuronal.inference.int8_rows import Int8Rows
from optimum_neuronal.inference.layouts import rows_of
from optimum_neuronal.inference.packed_rows import DTYPES
from optimum_neuronal.inference.packed_tensor import PackedTensor


TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


def make_int8(out, columns, dtype=torch.float32, seed=0) -> Int8Weight:
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed))
    weight[1::5] = 0
    return Int8Weight.nearest(weight.to(dtype))


@examples(30)
@given(
    out=st.integers(1, 40),
    columns=st.integers(1, 300) | st.sampled_from([64, 128, 1024, 1100, 2200]),
    count=st.integers(1, 8),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_and_copies(out, columns, count, dtype, with_bias, seed):
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


def test_as_dense():
    for dtype, lead, int8 in product(DTYPES, [(), (1,), (2, 5), (40,), (0,)], [False, True]):
        rows = Int8Rows.of(make_int8(37, 133, dtype), "int8" if int8 else "bf16")
        x, bias = torch.randn(*lead, 133).to(dtype), torch.randn(37).to(dtype)
        y = rows.linear(x, bias)
        assert y.shape == (*lead, 37) and y.dtype == dtype
        assert not y.numel() or error(y, x, rows.unpack(), bias) < (3e-2 if int8 else TOLERANCE[dtype])


def test_many_rows_of_x_are_multiplied_block_by_block(monkeypatch):
    """Inputs are not rounded then."""
    rows, x, bias = Int8Rows.of(make_int8(37, 133)), torch.randn(40, 133), torch.randn(37)
    y = multiply_by_blocks(monkeypatch, "unpack_int8", rows.linear, x, bias)
    assert error(y, x, rows.unpack(), bias) < 1e-5


@pytest.mark.parametrize("activations", ["int8", "bf16"])
def test_without_kernels(activations, monkeypatch):
    """The same with torch alone, to the bit where sums are exact."""
    rows, x = Int8Rows.of(make_int8(37, 300), activations), torch.randn(5, 300)
    found, dense = rows.linear(x), rows.unpack()
    monkeypatch.setattr(int8_ops, "find_kernel", lambda: None)
    expected = rows.linear(x)
    assert torch.equal(found, expected) if activations == "int8" else torch.allclose(found, expected, atol=1e-4)
    assert torch.equal(rows.unpack(), dense)


def test_what_is_not_finite_stays_in_its_row():
    for special in [float("nan"), float("inf")]:
        rows, x = Int8Rows.of(make_int8(7, 300)), torch.randn(3, 300)
        plain = rows.linear(x)
        x[1, 200] = special
        y = rows.linear(x)
        assert y[1].isnan().all() and torch.equal(y[[0, 2]], plain[[0, 2]])


def test_what_does_not_fit_is_refused():
    rows, x = Int8Rows.of(make_int8(4, 70)), torch.zeros(1, 70)
    for arguments, message in (
        ((torch.zeros(1, 71), rows.levels, rows.scales), "have levels of"),
        ((x, rows.levels.float(), rows.scales), "levels of torch.float32"),
        ((x, rows.levels, rows.scales[:, :0]), "have scales of"),
        ((x, rows.levels, rows.scales, torch.zeros(3)), "the bias is"),
        ((x.double(), rows.levels, rows.scales), "cannot be computed in torch.float64"),
        ((x.to("meta"), rows.levels, rows.scales), "x is on meta"),
        ((torch.tensor(1.0), rows.levels, rows.scales), "no dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            int8_ops.int8_linear(*arguments)
    torch.library.opcheck(torch.ops.optimum_neuronal.int8_linear.default, (x, rows.levels, rows.scales, None, True))
    torch.library.opcheck(torch.ops.optimum_neuronal.unpack_int8.default, (rows.levels, rows.scales, torch.float16))


def test_rows_are_looked_up_alone_and_cut_and_joined():
    int8 = make_int8(12, 200, torch.bfloat16)
    rows, dense = Int8Rows.of(int8), int8.unpack()
    ids = torch.tensor([[3, 0], [11, 3]])
    for numbers in (ids, ids.int()):
        assert torch.equal(rows.look_up(numbers), dense[ids])
    assert rows.look_up(ids[:0]).shape == (0, 2, 200)
    for bad in (-1, 12):
        with pytest.raises((IndexError, RuntimeError)):
            rows.look_up(torch.tensor([bad]))
    joined = Int8Rows.joined([rows.part(4, 9), rows.window(0, 2)])
    joined.check()
    assert torch.equal(joined.unpack(), torch.cat([dense[4:9], dense[:2]])) and rows.joins(joined)
    assert not rows.joins(Int8Rows.of(int8, "bf16"))
    again = rows_of(rows.kind, [getattr(rows, name) for name in rows.names], 200)
    assert type(again) is Int8Rows and again.activations == "int8" and torch.equal(again.unpack(), dense)
    half = rows.converted(None, torch.float16)
    assert half.dtype == torch.float16 and half.scales.dtype == torch.int16
    assert rows.nbytes == 12 * 200 + 12 * 2 * 2 and rows.kept == 2400


def test_as_a_tensor_it_stays_in_8_bits():
    int8 = make_int8(12, 200)
    tensor = PackedTensor.of(int8)
    assert torch.equal(tensor.unpack(), int8.unpack()) and tensor.packed() is None and tensor.coded() is None
    assert torch.equal(tensor.int8().levels, int8.levels) and tensor[2:5].int8().shape == (3, 200)
    assert tensor.to(torch.float16).int8().dtype == torch.float16 and tensor[None].int8() is None


def test_damage_is_found():
    for damage, message in [
        (lambda rows: {"levels": torch.full_like(rows.levels, -128)}, "-128 among them"),
        (lambda rows: {"levels": rows.levels.int()}, "its levels have dtype torch.int32"),
        (lambda rows: {"levels": rows.levels[1:]}, "its levels have dtype"),
        (lambda rows: {"scales": torch.full_like(rows.scales, 0x7F80)}, "its scales are not all finite"),
        (lambda rows: {"scales": rows.scales[:, :1]}, "its scales have dtype"),
        (lambda rows: {"scales": rows.scales.to("meta")}, "its scales lie on meta"),
    ]:
        rows = Int8Rows.of(make_int8(5, 168))
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(rows, **damage(rows)).check()
