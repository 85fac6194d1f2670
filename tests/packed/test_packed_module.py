"""Packed modules compute what dense ones did. After buffers were loaded or replaced, they are checked, or raise an error."""

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import finite
from packed_models import logits, make_zeroed
from profiles import examples
from torch import nn
from transformers import Conv1D

from optimum_neuronal import sparsify
from optimum_neuronal.packed.packed_module import PackedLinear, packed_modules
from optimum_neuronal.packed.packed_weight import PackedWeight
from optimum_neuronal.packed.replacing import PackedHeader, put_empty, put_packed


X = torch.ones(2, 192, dtype=torch.bfloat16)
STORED = ("packed_mask", "packed_values")


@pytest.fixture
def module():
    return PackedLinear(PackedWeight.pack(finite((8, 192), torch.bfloat16))).eval()


@pytest.mark.parametrize(
    "name, damage",
    [
        ("packed_mask", lambda t: t ^ 1),
        ("packed_mask", lambda t: t[:3]),
        ("packed_values", lambda t: torch.cat([t, t])),
    ],
)
def test_replaced_buffers_are_checked_before_they_are_used(module, name, damage):
    """A kernel reads where masks and shapes tell it to: this is the test that it never sees damaged ones."""
    expected, good = module(X), getattr(module, name)
    setattr(module, name, damage(good))
    for use in (module.check, lambda: module(X), lambda: torch.compile(module, backend="eager")(X)):
        with pytest.raises(ValueError, match="A packed weight cannot be used: its"):
            use()
    setattr(module, name, good.clone())
    assert torch.equal(module(X), expected)


@pytest.mark.parametrize("assign", [False, True, None])
def test_damaged_state_dicts_raise(module, assign):
    """Of the right shapes; torch raises an error for others. With None the memory of an emptied module is damaged."""
    expected, state = module(X), copy.deepcopy(module.state_dict())
    if assign is None:
        module.to("meta").to_empty(device="cpu").packed_mask.fill_(0xFF)
    else:
        with pytest.raises(RuntimeError, match="A packed weight cannot be used"):
            module.load_state_dict({**state, "packed_mask": torch.full_like(module.packed_mask, 0xFF)}, assign=assign)
    with pytest.raises(ValueError, match="A packed weight cannot be used"):
        module(X)
    module.load_state_dict(state, assign=bool(assign))
    assert torch.equal(module(X), expected)


def headers_of(model) -> dict[str, PackedHeader]:
    return {
        name: PackedHeader(m.dense_shape, m.dtype, {key: getattr(m, key).to("meta") for key in STORED}, m.transposed)
        for name, m in packed_modules(model)
    }


def on_meta(model):
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss", "gemma3_text"])
def test_an_empty_model_takes_the_state_of_a_packed_one(family, ids):
    """As transformers loads a packed checkpoint."""
    dense = make_zeroed(family, num_hidden_layers=2)
    model = sparsify(copy.deepcopy(dense))
    empty = on_meta(dense)
    put_empty(empty, headers_of(model))
    assert empty.state_dict().keys() == model.state_dict().keys()
    for name, buffer in model.named_buffers():  # those that are in no state dict
        path, _, key = name.rpartition(".")
        empty.get_submodule(path)._buffers[key] = torch.zeros_like(buffer) if "offsets" in name else buffer.clone()
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(logits(empty.eval(), ids), logits(model, ids))


@pytest.mark.parametrize("change, message", [
    ({"shape": (48, 33)}, r"its shape is \[48, 33\]: expected \[48, 32\] for the model"),
    ({"transposed": True}, "'transposed' is True: expected False"),
    ({"dtype": torch.int8}, "its dtype is torch.int8"),
    ({"tensors": {}}, "it has no mask"),
    ({"tensors": {"packed_mask": torch.zeros(47, 8).byte(), "packed_values": torch.zeros(9)}}, r"its mask have dtype"),
])  # fmt: skip
def test_headers_that_do_not_fit(change, message):
    model, path = make_zeroed(), "model.layers.0.mlp.up_proj"
    header = headers_of(sparsify(copy.deepcopy(model)))[path]
    with pytest.raises(ValueError, match=f"The packed weight of {path} cannot be loaded: .*{message}"):
        put_empty(on_meta(model), {path: dataclasses.replace(header, **change)})
    for name in ("model.layers.7", "model.norm"):
        with pytest.raises(ValueError, match=f"{name} cannot be loaded: the model has no such weight to pack"):
            put_empty(on_meta(model), {name: header})


def test_experts_of_which_one_weight_is_packed():
    model = make_zeroed("mixtral")
    headers = headers_of(sparsify(copy.deepcopy(model)))
    del headers["model.layers.1.mlp.experts.down_proj"]
    message = "layers.1.mlp.experts.down_proj cannot be loaded: the checkpoint has it dense"
    with pytest.raises(ValueError, match=message):
        put_empty(on_meta(model), headers)


def test_copies_share_nothing_and_keep_their_matrix(module):
    assert module.matrix is module.matrix, "made once"
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.matrix is not module.matrix and torch.equal(other(X), module(X))
        assert other.float().matrix.dtype == torch.float32
    assert module.matrix.dtype == torch.bfloat16


def sparse_linear(rows=37, columns=100, bias=True, sparsity=0.7, conv=False, dtype=torch.float32):
    linear = Conv1D(rows, columns) if conv else nn.Linear(columns, rows, bias=bias)
    linear.weight.data.copy_(finite(linear.weight.shape, density=1 - sparsity))
    if linear.bias is not None:
        linear.bias.data.normal_()
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
    allowed = 2e-5 if dtype == torch.float32 else 5e-2
    assert (packed(x).float() - expected).abs().max() <= allowed * (1 + expected.abs().max())
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
        said = r"to train them, call optimum_neuronal.densify\(model\) first.*lora_for_packed"
        with pytest.raises(RuntimeError, match=said):
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
