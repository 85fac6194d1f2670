import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import finite
from profiles import examples
from torch import nn
from transformers import Conv1D

from optimum_neuronal.packed.packed_linear import PackedLinear
from optimum_neuronal.packed.packed_weight import PackedWeight
from optimum_neuronal.packed.replacing import put_packed


def sparse_linear(rows=37, columns=100, bias=True, sparsity=0.7, conv=False, dtype=torch.float32):
    linear = Conv1D(rows, columns) if conv else nn.Linear(columns, rows, bias=bias)
    linear.weight.data.copy_(finite(linear.weight.shape, density=1 - sparsity))
    return linear.to(dtype).eval()


def pack(linear):
    holder = nn.ModuleDict({"layer": linear})
    put_packed(holder, "layer", PackedWeight.pack(linear.weight.T if isinstance(linear, Conv1D) else linear.weight))
    return holder["layer"]


@examples(40)
@given(
    st.integers(1, 70), st.integers(1, 140), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.booleans(), st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)  # fmt: skip
def test_computes_what_the_layer_did_and_gives_it_back(rows, columns, sparsity, bias, conv, dtype):
    linear = sparse_linear(rows, columns, bias, sparsity, conv, dtype)
    packed = pack(linear)
    x = torch.randn(2, 3, columns, dtype=dtype)
    expected = linear.float()(x.float())
    assert (packed(x).float() - expected).abs().max() <= (2e-5 if dtype == torch.float32 else 5e-2) * (
        1 + expected.abs().max()
    )
    again, linear = packed.to_dense_module(), linear.to(dtype)
    assert type(again) is type(linear)
    assert torch.equal(again.weight.view(torch.uint8), linear.weight.view(torch.uint8))
    assert (again.bias is None) == (linear.bias is None) and (bias is False or torch.equal(again.bias, linear.bias))


def test_facts():
    packed = pack(sparse_linear(64, 128, sparsity=0.75))
    assert (packed.in_features, packed.out_features) == (128, 64)
    assert packed.dense_bytes == 64 * 128 * 4
    assert list(packed.state_dict()) == ["packed_mask", "packed_values", "bias"], "as in a file"
    assert (packed.dense_shape, packed.dtype) == ((64, 128), torch.float32)
    assert "in_features=128, out_features=64, bias=True, dtype=torch.float32" in repr(packed)
    assert "of 32,768" in repr(packed)
    assert not list(packed.parameters()), "nothing for an optimizer"
    conv = pack(sparse_linear(conv=True))
    assert conv.weight.shape == (100, 37) and conv.transposed


def test_only_values_are_converted():
    linear = sparse_linear()
    packed = pack(linear).half()
    assert packed.packed_mask.dtype == torch.uint8
    assert packed.packed_values.dtype == packed.bias.dtype == packed.weight.dtype == torch.float16
    assert torch.equal(packed.to_dense_module().weight, linear.half().weight)
    packed, x = packed.bfloat16(), torch.randn(2, 100)
    assert packed(x).dtype == torch.bfloat16 and torch.equal(packed(x), packed(x.bfloat16()))
    with torch.autocast("cpu", torch.float16):
        assert packed(x).dtype == torch.float16
    with pytest.raises(ValueError, match=r"its dtype is torch.float64: expected one of torch.bfloat16"):
        packed.double()(x)


def test_compiled_and_gradients_flow_only_for_adapters():
    """Otherwise the other weights would be trained beside packed ones that silently stay as they are."""
    linear, x = sparse_linear(), torch.randn(2, 100, requires_grad=True)
    packed = pack(linear)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), packed(x))
    for module in (packed, compiled):
        output = module(x)  # may be looked at
        with pytest.raises(RuntimeError, match=r"to train them, call optimum_neuronal.densify\(model\) first"):
            output.sum().backward()
    packed.passes_gradients = True
    for module in (packed, torch.compile(packed, fullgraph=True, backend="aot_eager")):
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x)
        (expected,) = torch.autograd.grad(linear(x).square().sum(), x)
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-4)


def test_hooks_and_mode_go_along():
    linear, seen = sparse_linear().train(), []
    handle = linear.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    packed = pack(linear)
    assert packed.training
    packed(torch.randn(1, 100))
    packed.to_dense_module()(torch.randn(1, 100))
    handle.remove()
    packed(torch.randn(1, 100))
    assert seen == [PackedLinear, nn.Linear]
