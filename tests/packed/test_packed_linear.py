import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from torch import nn
from transformers import Conv1D

from optimum_neuronal.packed.formats.packed_matrix import FORMATS
from optimum_neuronal.packed.packed_linear import PackedLinear


def sparse_linear(rows=37, columns=100, bias=True, sparsity=0.7, conv=False, dtype=torch.float32):
    torch.manual_seed(0)
    linear = Conv1D(rows, columns) if conv else nn.Linear(columns, rows, bias=bias)
    linear.weight.data.normal_()
    linear.weight.data[torch.rand_like(linear.weight) < sparsity] = 0
    linear.bias.data.normal_() if linear.bias is not None else None
    return linear.to(dtype).eval()


@examples(40)
@given(
    st.integers(1, 70), st.integers(1, 140), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.booleans(), st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)  # fmt: skip
def test_computes_what_the_layer_did_and_gives_it_back(rows, columns, sparsity, bias, conv, dtype):
    linear = sparse_linear(rows, columns, bias, sparsity, conv, dtype)
    packed = PackedLinear.from_linear(linear)
    x = torch.randn(2, 3, columns, dtype=dtype)
    expected = linear.float()(x.float())
    assert (packed(x).float() - expected).abs().max() <= (2e-5 if dtype == torch.float32 else 5e-2) * (
        1 + expected.abs().max()
    )
    again, linear = packed.to_linear(), linear.to(dtype)
    assert type(again) is type(linear)
    assert torch.equal(again.weight.view(torch.uint8), linear.weight.view(torch.uint8))
    assert (again.bias is None) == (linear.bias is None) and (bias is False or torch.equal(again.bias, linear.bias))


def test_bits_that_are_no_numbers_come_back():
    linear = sparse_linear()
    linear.weight.data[0, :4] = torch.tensor([-0.0, float("nan"), 1e-45, -float("inf")])
    again = PackedLinear.from_linear(linear).to_linear()
    assert torch.equal(again.weight.view(torch.uint8), linear.weight.view(torch.uint8))


def test_what_it_tells_of_itself():
    packed = PackedLinear.from_linear(sparse_linear(64, 128, sparsity=0.75))
    assert (packed.in_features, packed.out_features) == (128, 64)
    assert packed.sparsity == pytest.approx(0.75, abs=0.02) and packed.dense_bytes == 64 * 128 * 4
    assert packed.packed_bytes == sum(b.nbytes for name, b in packed.named_buffers() if name != "bias")
    assert "in_features=128, out_features=64, bias=True, sparsity=0.7" in repr(packed) and "of 32,768" in repr(packed)
    assert not list(packed.parameters()), "nothing for an optimizer"


def test_only_values_are_converted():
    linear = sparse_linear()
    packed = PackedLinear.from_linear(linear).half()
    assert (packed.bits.dtype, packed.offsets.dtype) == (torch.uint8, torch.int64)
    assert packed.values.dtype == packed.bias.dtype == packed.weight.dtype == torch.float16
    assert torch.equal(packed.to_linear().weight, linear.half().weight)
    with pytest.raises(TypeError, match="cannot be torch.float64"):
        packed.double()
    assert packed.values.dtype == torch.float16, "as it was"
    assert PackedLinear.from_linear(linear).to("meta").weight.is_meta
    packed, x = packed.bfloat16(), torch.randn(2, 100)
    assert packed(x).dtype == torch.bfloat16 and torch.equal(packed(x), packed(x.bfloat16()))
    with torch.autocast("cpu", torch.float16):
        assert packed(x).dtype == torch.float16


def test_a_dense_state_is_refused():
    packed = PackedLinear.from_linear(sparse_linear())
    with pytest.raises(
        RuntimeError, match=r"weight is dense, but the model's is packed: call optimum_neuronal.densify"
    ):
        packed.load_state_dict(sparse_linear().state_dict())


def test_training_is_refused():
    packed, x = PackedLinear.from_linear(sparse_linear()), torch.randn(2, 100, requires_grad=True)
    output = packed(x)  # evaluation mode: may be looked at
    assert output.requires_grad
    with pytest.raises(RuntimeError, match=r"no gradients: to train it, call optimum_neuronal.densify\(model\) first"):
        output.sum().backward()
    with pytest.raises(RuntimeError, match=r"densify\(model\) first"):
        packed.train()(x)
    packed(x.detach()), torch.no_grad()(packed)(x)  # dropout aside, these only compute


def test_compiled_before_anything_was_computed(monkeypatch):
    """A graph must not look for formats in files: in a new process nobody has looked for them yet."""
    packed = PackedLinear.from_linear(sparse_linear())
    monkeypatch.setattr(FORMATS, "_discovered", False)
    compiled = torch.compile(packed, fullgraph=True, backend="eager")
    x = torch.randn(2, 100)
    assert torch.equal(compiled(x), packed(x))


def test_compiled():
    packed, x = PackedLinear.from_linear(sparse_linear()), torch.randn(2, 100)
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), packed(x))
    output = compiled(x.requires_grad_())
    with pytest.raises(RuntimeError, match="compute no gradients"):
        output.sum().backward()


def test_hooks_and_mode_go_along():
    linear, seen = sparse_linear().train(), []
    handle = linear.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    packed = PackedLinear.from_linear(linear)
    assert packed.training
    packed(torch.randn(1, 100))
    packed.to_linear()(torch.randn(1, 100))
    handle.remove()
    packed(torch.randn(1, 100))
    assert seen == [PackedLinear, nn.Linear]


def test_the_weight_is_facts():
    weight = PackedLinear.from_linear(sparse_linear(conv=True)).weight
    assert weight.shape == (100, 37) and weight.ndim == weight.dim() == 2 and weight.size(0) == 100
    assert weight.numel() == 3700 and weight.device == torch.device("cpu") and weight.is_floating_point()
    for work in (
        lambda: nn.functional.linear(torch.randn(1, 100), weight),
        lambda: weight[0],
        lambda: torch.equal(weight, weight),
    ):
        with pytest.raises(TypeError, match="[aA] packed weight.*densify"):
            work()
    with pytest.raises(AttributeError, match="has no 'data': call optimum_neuronal.densify"):
        _ = weight.data


def test_what_it_is_made_of():
    with pytest.raises(TypeError, match="nn.Linear or a Conv1D, not a Embedding"):
        PackedLinear.from_linear(nn.Embedding(3, 4))
    with pytest.raises(ValueError, match="float64"):
        PackedLinear.from_linear(nn.Linear(3, 4).double())
