"""What packed modules hold after their buffers were loaded or replaced: checked tensors, or an error."""

import copy
import dataclasses
import pickle

import pytest
import torch
from kernel_checks import finite
from packed_models import logits, make_zeroed

from optimum_neuronal import sparsify
from optimum_neuronal.packed.packed_linear import PackedLinear
from optimum_neuronal.packed.packed_module import packed_modules
from optimum_neuronal.packed.packed_weight import PackedWeight
from optimum_neuronal.packed.replacing import PackedHeader, put_empty


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
        name: PackedHeader(
            m.dense_shape,
            m.dtype,
            {buffer: getattr(m, buffer).to("meta") for buffer in STORED},
            m.transposed,
        )
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
    with pytest.raises(
        ValueError, match="layers.1.mlp.experts.down_proj cannot be loaded: the checkpoint has it dense"
    ):
        put_empty(on_meta(model), headers)


def test_copies_share_nothing_and_keep_their_matrix(module):
    assert module.matrix is module.matrix, "made once"
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.matrix is not module.matrix and torch.equal(other(X), module(X))
        assert other.float().matrix.dtype == torch.float32
    assert module.matrix.dtype == torch.bfloat16
