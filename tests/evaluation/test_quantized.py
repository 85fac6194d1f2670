import sys
from types import ModuleType

import pytest
import torch
from conftest import make_model
from torch import nn

from optimum_neuronal.evaluation import quantized
from optimum_neuronal.evaluation.quantized import FORMS, NotQuantized, footprint, has_torchao, quantize


NAMES = [f"model.layers.{block}.{name}" for block in range(2) for name in ("self_attn.q_proj", "mlp.up_proj")]


class Halved(nn.Parameter):
    """What a stand-in for torchao puts in the place of a weight."""

    def __new__(cls, weight):
        return super().__new__(cls, weight.half().to(weight.dtype), requires_grad=False)


class Config:
    def __init__(self, **options):
        self.options = options


def broken(**options):
    raise ImportError("Requires a library\nthat is not there")


@pytest.fixture
def torchao(monkeypatch):
    """A torchao whose configs all do the same; the list holds the configs that it was called with."""
    called = []

    def quantize_(model, config, filter_fn=lambda module, name: True):
        called.append(config)
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and filter_fn(module, name):
                module.weight = Halved(module.weight.detach())

    own = {name: ModuleType(f"torchao{name}") for name in ("", ".quantization", ".prototype.quantization.int4")}
    for name, module in own.items():
        monkeypatch.setitem(sys.modules, f"torchao{name}", module)
    own[".quantization"].quantize_ = quantize_
    own[".quantization"].Int8WeightOnlyConfig = Config
    own[".quantization"].Int4WeightOnlyConfig = broken
    own[".prototype.quantization.int4"].PrototypeInt4WeightOnlyConfig = Config
    own["called"] = called
    return own


def test_the_named_layers_are_quantised_and_no_others(torchao):
    model = make_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert has_torchao() and quantize(model, NAMES, "torchao int8") is model
    changed = {name for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), Halved)}
    assert changed == {*NAMES} and torch.equal(torch.get_rng_state(), state)
    others = {name: value for name, value in model.state_dict().items() if name.removesuffix(".weight") not in NAMES}
    assert all(torch.equal(value, before[name]) for name, value in others.items())


def test_the_first_way_that_works_is_taken(torchao):
    """With the largest group of columns that divides all layers', which have 32."""
    quantize(make_model("llama"), NAMES, "torchao int4")
    assert [config.options for config in torchao["called"]] == [{"group_size": 32}] * 2


def test_why_not_is_a_phrase_and_no_weight_is_changed(torchao, monkeypatch):
    model = make_model("llama")
    torchao[".prototype.quantization.int4"].PrototypeInt4WeightOnlyConfig = broken
    with pytest.raises(NotQuantized, match="^Requires a library$"):
        quantize(model, NAMES, "torchao int4")
    monkeypatch.setattr(quantized, "GROUPS", (128,))
    with pytest.raises(NotQuantized, match="^no group of 128 columns divides all of its projections$"):
        quantize(model, NAMES, "torchao int4")
    torchao[".quantization"].quantize_ = lambda *args, **options: None
    with pytest.raises(NotQuantized, match="^weights with 32 columns are left as they are$"):
        quantize(model, NAMES, "torchao int8")
    with pytest.raises(NotQuantized, match="^model.layers.0.mlp.experts is no nn.Linear$"):
        quantize(model, ["model.layers.0.mlp.experts"], "torchao int8")
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_torchao_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert not has_torchao()


def test_what_is_wrapped_is_counted():
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, (4, 8), dtype=torch.float32)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ["inner"], None

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return args[0]

    module = nn.Linear(8, 4)
    assert footprint(module) == 4 * (32 + 4)
    module.weight = nn.Parameter(Wrapped(torch.zeros(4, 8, dtype=torch.uint8)), requires_grad=False)
    assert footprint(module) == 32 + 4 * 4


@pytest.mark.parametrize("form", FORMS)
def test_torchao_itself(form):
    """What it puts in the place of weights computes nearly the same, in fewer bytes."""
    pytest.importorskip("torchao")
    model, ids = make_model("llama").bfloat16(), torch.arange(12)[None]
    before, expected = footprint(model), model(ids).logits
    try:
        quantize(model, NAMES, form)
    except NotQuantized as why:
        assert form == "torchao int4" and "\n" not in str(why)
        pytest.skip(f"{form}: {why}")
    assert footprint(model) < before
    error = (model(ids).logits - expected).float().norm() / expected.float().norm()
    assert 0 < error < {"torchao int8": 0.05, "torchao int4": 0.3}[form]
