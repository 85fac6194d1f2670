"""What packed modules hold after their buffers were loaded or replaced: checked tensors, or an error."""

import copy
import dataclasses
import pickle

import pytest
import torch
from packed_models import logits, make_zeroed, pack
from torch import nn

from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.formats.sparse import SparseWeight
from optimum_neuronal.packed.packed_embedding import PackedEmbedding
from optimum_neuronal.packed.packed_linear import PackedLinear
from optimum_neuronal.packed.packed_module import packed_modules
from optimum_neuronal.packed.replacing import PackedHeader, put_empty


def sparse(rows=8, columns=192):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()
    return weight.masked_fill(weight.abs() < 0.8, 0)


def modules():
    plain = QuantizedWeight.nearest(sparse(), 3)
    yield PackedLinear(SparseWeight.pack(sparse())).eval()
    yield PackedLinear(dataclasses.replace(plain, steps=torch.linspace(0.5, 1, 192).bfloat16())).eval()
    yield PackedEmbedding(QuantizedWeight.nearest(sparse()), nn.Embedding(8, 192)).eval()


@pytest.fixture(params=range(3), ids=["sparse", "quantized", "embeddings"])
def module(request):
    return list(modules())[request.param]


def compute(module):
    x = torch.arange(8) if isinstance(module, PackedEmbedding) else torch.ones(2, 192, dtype=torch.bfloat16)
    return module(x)


DAMAGES = {
    "packed_mask": [
        lambda t: t ^ 1,
        lambda t: t[:3],
        lambda t: t[0, 0],
        lambda t: t.int(),
        lambda t: t.mT.contiguous().mT,
    ],
    "packed_values": [lambda t: t[:3], lambda t: t.float(), lambda t: t[None], lambda t: torch.cat([t, t])],
    "packed_codes": [lambda t: t[:1, :1], lambda t: t.float(), lambda t: t.view(-1)],
    "packed_scales": [lambda t: t[:3], lambda t: torch.full_like(t, 0xFF), lambda t: t.view(torch.bfloat16)],
    "packed_steps": [lambda t: t[:2], lambda t: torch.zeros_like(t)],
}


def test_replaced_buffers_are_checked_before_they_are_used(module):
    """A kernel reads where masks and shapes tell it to: this is the test that it never sees damaged ones."""
    expected, tried = compute(module), 0
    for name in module.stored_names:
        good = getattr(module, name)
        for damage in DAMAGES[name]:
            setattr(module, name, damage(good))
            with pytest.raises(ValueError, match="A packed weight cannot be used: its"):
                compute(module)
            with pytest.raises(ValueError, match="A packed weight cannot be used: its"):
                module.check()
            tried += 1
        setattr(module, name, good.clone())
        assert torch.equal(compute(module), expected)
    assert tried >= 6


def test_damaged_state_dicts_raise(module):
    """Of the right shapes; torch raises an error for others."""
    expected, state = compute(module), copy.deepcopy(module.state_dict())
    name = "packed_mask" if module.format == "sparse" else "packed_scales"
    for assign in (False, True):
        with pytest.raises(RuntimeError, match="A packed weight cannot be used"):
            module.load_state_dict({**state, name: torch.full_like(state[name], 0xFF)}, assign=assign)
        with pytest.raises(ValueError, match="A packed weight cannot be used"):
            compute(module)
        module.load_state_dict(state, assign=assign)
        assert torch.equal(compute(module), expected)


def test_an_emptied_module_is_checked_again():
    module = next(modules())
    expected, state = compute(module), copy.deepcopy(module.state_dict())
    module.to("meta").to_empty(device="cpu")
    module.packed_mask.fill_(0xFF)  # what such memory may hold
    with pytest.raises(ValueError, match="A packed weight cannot be used"):
        compute(module)
    module.load_state_dict(state)
    assert torch.equal(compute(module), expected)


def headers_of(model) -> dict[str, PackedHeader]:
    return {
        name: PackedHeader(
            m.format, m.dense_shape, m.dtype,
            {buffer: getattr(m, buffer).to("meta") for buffer in m.stored_names}, m.transposed,
        )
        for name, m in packed_modules(model)
    }  # fmt: skip


def on_meta(model):
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("bits", [{}, {"bits": 4, "embedding_bits": 8}], ids=["sparse", "quantized"])
def test_an_empty_model_takes_the_state_of_a_packed_one(family, bits, ids):
    """As transformers loads a packed checkpoint."""
    dense = make_zeroed(family, num_hidden_layers=2)
    model = pack(copy.deepcopy(dense), **bits)
    expected = logits(model, ids)
    empty = on_meta(dense)
    put_empty(empty, headers_of(model))
    assert empty.state_dict().keys() == model.state_dict().keys()
    assert all(
        name in empty.state_dict() for m, p in packed_modules(model) for name in (f"{m}.{b}" for b in p.stored_names)
    )
    for name, buffer in model.named_buffers():  # those that are in no state dict
        path, _, key = name.rpartition(".")
        empty.get_submodule(path)._buffers[key] = torch.zeros_like(buffer) if "offsets" in name else buffer.clone()
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(logits(empty.eval(), ids), expected)


@pytest.mark.parametrize("change, message", [
    ({"format": "sparce"}, "Unknown packed format 'sparce'"),
    ({"shape": (48, 33)}, r"its shape is \[48, 33\]: expected \[48, 32\] for the model"),
    ({"transposed": True}, "'transposed' is True: expected False"),
    ({"dtype": torch.int8}, "its dtype is torch.int8"),
    ({"tensors": {}}, "it has no mask"),
    ({"tensors": {"packed_mask": torch.zeros(47, 8).byte(), "packed_values": torch.zeros(9)}}, r"its mask have dtype"),
])  # fmt: skip
def test_headers_that_do_not_fit(change, message):
    model, path = make_zeroed(), "model.layers.0.mlp.up_proj"
    header = headers_of(pack(copy.deepcopy(model)))[path]
    with pytest.raises(ValueError, match=f"The packed weight of {path} cannot be loaded: .*{message}"):
        put_empty(on_meta(model), {path: dataclasses.replace(header, **change)})
    for name, why in (("model.layers.7", "has no attribute .7."), ("model.norm", "LlamaRMSNorm has no packed form")):
        with pytest.raises(ValueError, match=why):
            put_empty(on_meta(model), {name: header})


def test_copies_share_nothing_and_keep_their_matrix(module):
    assert module.matrix is module.matrix, "made once"
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.matrix is not module.matrix and torch.equal(compute(other), compute(module))
        assert other.float().matrix.dtype == torch.float32
    assert module.matrix.dtype == torch.bfloat16
