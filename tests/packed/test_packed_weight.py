"""A bitmask and the values that are kept, and products with them as modules and torch's graphs compute them."""

import dataclasses
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import any_bits, bits, check_product, finite
from profiles import examples

from optimum_neuronal.native.library import Kernel, find_kernel
from optimum_neuronal.packed import ops, packed_weight
from optimum_neuronal.packed.packed_weight import DTYPES, MAX_FUSED_ROWS, PackedWeight, count_kept
from optimum_neuronal.packed.sparse_matrix import row_blocks


def checked(weight: PackedWeight) -> PackedWeight:
    return PackedWeight.from_stored(weight.stored(), weight.shape, weight.dtype)


def test_known_layout():
    """Element j of a row is bit j % 8 of byte j // 8; rows begin at whole words; values follow row by row."""
    weight = PackedWeight.pack(torch.tensor([[0, 1.5, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, -3]]))
    assert weight.shape == (3, 5) and weight.mask.shape == (3, 8)
    assert weight.mask[:, 0].tolist() == [0b10010, 0, 0b10000] and not weight.mask[:, 1:].any()
    assert weight.values.tolist() == [1.5, 2, -3] and weight.offsets.tolist() == [0, 2, 2, 3]
    assert weight.nbytes == 3 * 8 + 3 * 4 + 4 * 8


@examples(60)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 200) | st.sampled_from([64, 128])),
    dtype=st.sampled_from([*DTYPES, torch.float64, torch.float8_e4m3fn]),
    density=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 1000),
)
def test_weights_of_any_bits_come_back(shape, dtype, density, seed):
    weight = any_bits(shape, dtype, density, seed)
    packed = PackedWeight.pack(weight)
    if weight.numel() and dtype in DTYPES:
        checked(packed)
    assert torch.equal(bits(packed.to_dense()), bits(weight)) and len(packed.values) == count_kept(weight)


def test_more_than_one_block(monkeypatch):
    weight = any_bits((150, 29))
    whole = PackedWeight.pack(weight)
    monkeypatch.setattr(row_blocks, "__defaults__", (64,))
    again = checked(PackedWeight.pack(weight))
    assert torch.equal(again.mask, whole.mask) and torch.equal(bits(again.values), bits(whole.values))
    assert torch.equal(bits(again.to_dense()), bits(weight))


@pytest.mark.parametrize("rows, columns", [(150, 70), (128, 64), (1, 1), (3, 200)])
def test_parts_of_rows_come_back(rows, columns):
    dense = finite((rows, columns), torch.bfloat16)
    weight, bounds = PackedWeight.pack(dense), sorted({0, 1, rows // 2, rows})
    for first, last in zip(bounds, bounds[1:]):
        assert torch.equal(weight.window(first, last).to_dense(), dense[first:last])
    assert torch.equal(checked(weight.to(torch.float32)).to_dense(), dense.float())


def test_without_kernels(monkeypatch):
    x, dense = torch.randn(3, 130), finite((70, 130))
    monkeypatch.setattr(packed_weight, "find_kernel", lambda: None)
    weight = PackedWeight.pack(dense)
    assert torch.equal(weight.to_dense(), dense)
    check_product(weight.multiply(x), x, dense)


@pytest.mark.parametrize("capability, dtype", [("AVX2", torch.float32), ("AVX512", torch.bfloat16)])
def test_many_rows_of_x_are_multiplied_in_the_dtype_that_is_fast(capability, dtype, monkeypatch):
    """Rounded once, to the dtype of x, either way; only products of float32 are fast without instructions for others."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    multiply, seen = torch.addmm, []
    monkeypatch.setattr(torch, "addmm", lambda *args, out: seen.append(args[2].dtype) or multiply(*args, out=out))
    x, bias, dense = torch.randn(40, 130).bfloat16(), torch.randn(70).bfloat16(), finite((70, 130), torch.bfloat16)
    check_product(PackedWeight.pack(dense).multiply(x, bias), x, dense, bias)
    assert set(seen) == {dtype}


def flip(tensor: torch.Tensor, *index: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[index] ^= 1
    return changed


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda w: {"mask": flip(w.mask, 2, 3)}, r"its bitmask keeps \d+ values, but \d+ are stored"),
        (lambda w: {"mask": flip(w.mask, 1, 9)}, "bits set past a row's 68 elements"),
        (lambda w: {"mask": w.mask[:, :8]}, r"its mask have dtype torch.uint8 and shape \[5, 8\]"),
        (lambda w: {"mask": w.mask.int()}, "its mask have dtype torch.int32"),
        (lambda w: {"mask": w.mask.t().contiguous().t()}, "its mask are not contiguous"),
        (lambda w: {"values": w.values[:-1]}, r"its bitmask keeps \d+ values, but \d+ are stored"),
        (lambda w: {"values": w.values[None]}, "its values have dtype"),
        (lambda w: {"values": w.values.double()}, "its dtype is torch.float64: expected one of"),
        (lambda w: {"values": w.values.to("meta")}, "its mask have .* on cpu: expected .* on meta"),
        (lambda w: {"shape": (5,)}, r"its shape is \(5,\): expected a list of 2 to 8"),
        (lambda w: {"shape": (5, -68)}, "its shape is"),
    ],
)
def test_damage_is_found(damage, message):
    weight = PackedWeight.pack(any_bits((5, 68), torch.bfloat16))
    with pytest.raises(ValueError, match=message):
        checked(dataclasses.replace(weight, **damage(weight)))


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


def test_torch_knows_the_operations_well():
    torch.library.opcheck(
        torch.ops.optimum_neuronal.packed_linear.default,
        (torch.randn(2, 70), PackedWeight.pack(finite((4, 70))).tensors(), None, True),
    )


def test_derivatives():
    """The gradient that autograd takes is that of the dense product. A second one raises an error; it is never zero."""
    dense, x = finite((37, 133)), torch.randn(40, 133, requires_grad=True)
    y = ops.sparse_linear(PackedWeight.pack(dense), x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    check_product(gradient.detach(), 2 * y.detach(), dense.T)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(gradient.square().sum(), x)
