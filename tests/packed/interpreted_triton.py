"""Tests that run under TRITON_INTERPRET=1: test_triton_kernels.py starts them in a process of their own.

The interpreter starts programs one after the other in numpy, so weights are tiny.
"""

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import FAR, any_bits, bits, check_product, far_behind, finite
from profiles import by_day, examples

from optimum_neuronal.packed import grouped_weight, packed_module
from optimum_neuronal.packed.grouped_weight import GroupedWeight
from optimum_neuronal.packed.packed_experts import PackedStack
from optimum_neuronal.packed.packed_module import PackedLinear
from optimum_neuronal.packed.packed_weight import DTYPES, PackedWeight


grouped_weight.TRITON_DEVICES = ("cpu",)


def grouped(weight) -> GroupedWeight:
    return GroupedWeight.from_packed(PackedWeight.pack(weight))


def check(x, weight, bias=None):
    """The interpreter cuts the last bits of a bfloat16 off, where compiled kernels round."""
    y = grouped(weight).multiply(x, bias)
    assert y.is_contiguous()
    check_product(y, x, weight, bias, roundings=2)


def test_columns():
    """Rows that are full, empty, or keep their first or last element alone, beside others; and more than 16 bits number."""
    for columns, density in by_day(
        product([1, 31, 32, 33, 255, 257, 2500, 70000], [0.01, 0.3]), (1, 0.3), (33, 0.3), (2500, 0.3), (70000, 0.01)
    ):
        weight = any_bits((6, columns), torch.float16, density)
        weight[1:5] = 0
        weight[1, :2500], weight[2, 0], weight[3, -1] = 1, 2, 3
        assert torch.equal(bits(grouped(weight).to_dense()), bits(weight))
        for count in (1, 2):
            check(finite((count, columns), torch.float32, 1, 2), finite((3, columns), torch.float32, density, seed=1))
            check(finite((count, columns), torch.float16, 1, 2), weight[1:5])


@examples(30)
@given(
    out=st.integers(0, 9),
    columns=st.integers(0, 200) | st.sampled_from([64, 128]),
    count=st.integers(0, 10),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 1000),
)
def test_any_weight(out, columns, count, dtype, density, seed):
    weight = any_bits((out, columns), dtype, density, seed)
    assert torch.equal(bits(grouped(weight).to_dense()), bits(weight))
    bias = finite((out,), dtype, 1)
    check(finite((count, columns), dtype, 1, seed), finite((out, columns), dtype, density, seed), bias)


def test_infinite_and_undefined_numbers():
    """What is not finite reaches the sums of the elements that are kept, and no others."""
    weight = torch.zeros(4, 70)
    weight[0, 3], weight[1, 5], weight[2, 66] = torch.inf, torch.nan, 2
    for value in (1.0, torch.inf, torch.nan):
        x = torch.ones(2, 70)
        x[0, 66] = value
        y = grouped(weight).multiply(x)
        assert not y[:, :2].isfinite().any() and not y[:, 3].any()
        assert y[1, 2] == 2 and (y[0, 2] == 2 if value == 1 else not y[0, 2].isfinite())


def test_more_rows_go_by_blocks(monkeypatch):
    monkeypatch.setattr(grouped_weight, "SCRATCH_ROWS", 8)
    monkeypatch.setattr(grouped_weight, "SCRATCH", 0)
    check(finite((20, 70), torch.bfloat16, 1, 2), finite((21, 70), torch.bfloat16), finite((21,), torch.bfloat16, 1))


def test_rows_of_a_larger_weight():
    """Starts of some rows beside all values: they do not begin at 0."""
    weight, x = finite((12, 70), torch.float32), finite((2, 70), torch.float32, 1, 2)
    part = grouped(weight).window(5, 9)
    assert part.starts[0] > 0 and torch.equal(part.to_dense(), weight[5:9])
    for inputs in (x, finite((grouped_weight.MAX_FUSED_ROWS + 1, 70), torch.float32, 1, 2)):
        check_product(part.multiply(inputs), inputs, weight[5:9])


def test_values_behind_two_to_the_31(tmp_path):
    weight, x = finite((4, 70), torch.bfloat16), finite((3, 70), torch.bfloat16, 1, 2)
    near = grouped(weight)
    groups = FAR // 32
    values, index = (far_behind(tensor, tmp_path, 32 * groups) for tensor in (near.values, near.index))
    base = far_behind(near.base, tmp_path, groups)
    far = replace(near, values=values, index=index, base=base, starts=near.starts + groups)
    assert torch.equal(far.to_dense(), weight)
    for inputs in (x, x[:1]):
        assert torch.equal(far.multiply(inputs), near.multiply(inputs))


def test_experts(monkeypatch):
    """Rows of x with an expert each, of which one has none. The host asks the device for no number."""
    monkeypatch.setattr(torch, "bincount", None)
    weight, x = finite((12, 70), torch.bfloat16), finite((4, 70), torch.bfloat16, 1, 2)
    stack = PackedStack(PackedWeight.pack(weight), 3, False, None)
    y = stack(x, torch.tensor([0, 2, 2, 3]))
    for row, expert in enumerate((0, 2, 2)):
        check_product(y[row : row + 1], x[row : row + 1], weight[4 * expert : 4 * expert + 4], roundings=2)
    assert y.shape == (4, 4) and not y[3].any()


@pytest.fixture
def module():
    return PackedLinear(PackedWeight.pack(finite((8, 192), torch.float32)))


def test_modules_hold_nothing_but_groups_and_state_dicts_are_those_of_files(module):
    assert {*module._buffers} == {"packed_values", "packed_index", "packed_base", "packed_starts", "bias"}
    assert module.packed_bytes == module.matrix.nbytes and module.matrix is module.matrix
    expected, x = PackedWeight.pack(module.dense()).stored(), torch.ones(2, 192)
    state, y = module.state_dict(), module(x)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    other = PackedLinear(PackedWeight.pack(module.dense().flip(0)))
    other.load_state_dict(state, assign=True)
    assert type(other.matrix) is GroupedWeight and torch.equal(other(x), y)
    with pytest.raises(RuntimeError, match="A packed weight cannot be used"):
        other.load_state_dict({**state, "packed_mask": torch.full_like(state["packed_mask"], 0xFF)})
    with pytest.raises(ValueError, match="A packed weight cannot be used"):
        other(x)
    other.load_state_dict(state)
    assert torch.equal(other(x), y)
    other.packed_values = state["packed_values"] * 2
    assert type(other.matrix) is GroupedWeight and torch.equal(other(x), 2 * y)


def test_modules_that_are_copied_cast_and_moved(module, monkeypatch):
    """A value that is too small for a dtype becomes 0, but stays kept."""
    dense = module.dense()
    dense[0, 0] = 1e-12
    module = PackedLinear(PackedWeight.pack(dense))
    for other in (copy.deepcopy(module), copy.deepcopy(module).half()):
        assert type(other.matrix) is GroupedWeight and other.matrix is not module.matrix
        assert torch.equal(other.dense(), dense.to(other.dtype))
        assert torch.equal(other.state_dict()["packed_mask"], module.state_dict()["packed_mask"])
    monkeypatch.setattr(packed_module, "find_kernels", lambda device: None)
    other = module.to(torch.float32)  # elsewhere
    assert type(other.matrix) is PackedWeight and torch.equal(other.dense(), dense)


def test_graphs_and_gradients(module):
    """A module that was just cast is compiled whole, and gradients for adapters are those of the dense product."""
    module.passes_gradients, x = True, torch.randn(2, 192, requires_grad=True)
    compiled = torch.compile(module.half().float(), fullgraph=True, backend="aot_eager")
    (expected,) = torch.autograd.grad((x @ module.dense().T).square().sum(), x)
    for function in (module, compiled):
        (gradient,) = torch.autograd.grad(function(x).square().sum(), x)
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-4)


def test_operations_on_groups():
    weight = grouped(finite((4, 70), torch.float32))
    torch.library.opcheck(
        torch.ops.optimum_neuronal.packed_linear.default, (torch.randn(2, 70), weight.tensors(), None, True)
    )
    assert torch.equal(weight.to_dense(), weight.packed().to_dense())
