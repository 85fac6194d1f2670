"""A prune that quantises: its weights by hand, whatever the batch, and what it leaves if it fails."""

import pytest
import torch
from conftest import FEW, make_model
from trial_helpers import state

from optimum_neuronal import NeuronALConfig, NeuronALPruner, densify
from optimum_neuronal.blocks.block_inputs import Stream, inference
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.blocks.statistics import Hessian
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.packed_linear import PackedLinear
from optimum_neuronal.packed.packed_module import packed_modules
from optimum_neuronal.saliency.low_bit import Quantizer


def pruner_of(bits=6.0, **fields):
    defaults = {"num_samples": 12, "num_alignment_samples": 4, "min_expert_tokens": 1}
    return NeuronALPruner(NeuronALConfig(bits_per_weight=bits, **{**defaults, **fields}))


def quantise(model, ids, **fields):
    memory = {name: fields.pop(name) for name in ("batch_size", "work_dir") if name in fields}
    pruner = pruner_of(**fields)
    pruner.prune(model, ids, **memory)
    return pruner


def matrices(model) -> dict[str, QuantizedWeight]:
    return {name: module.matrix for name, module in packed_modules(model) if isinstance(module, PackedLinear)}


def equal(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


@pytest.mark.parametrize("family", sorted({*FEW, "gpt_oss"} - {"llama4_text"}))
def test_the_model_computes_with_codes_within_the_budget(family, ids):
    model, dense = make_model(family), make_model(family)
    pruner = quantise(model, ids)
    report, config = pruner.report, model.config.sparsity_config
    bits = {name: own["bits"] for name, own in report.projections.items()}
    assert 5 < report.bits_per_weight <= 6 and report.requested_sparsity == 0
    assert all(matrix.bits == bits[name] for name, matrix in matrices(model).items())
    assert config["bits_per_weight"] == report.bits_per_weight
    for own in config["projections"].values():
        assert 2 <= own["bits"] <= 8
    with torch.no_grad():
        found = model(ids).logits
        assert not torch.equal(found, dense(ids).logits)
        torch.testing.assert_close(densify(model)(ids).logits, found, atol=0.05, rtol=0.05)
    assert not list(packed_modules(model))


def test_the_first_projections_are_quantised_on_the_dense_models_inputs(ids):
    """The others see what earlier ones leave, so a single kind of projection is compared by hand."""
    model, dense = make_model("llama"), make_model("llama")
    quantise(model, ids, targets=[r"layers\.0\.self_attn\.[qk]_proj"], topup="uniform")
    decoder = find_decoder(dense)
    with inference(dense):
        runner = BlockRunner(decoder, 4)
        inputs = runner.capture(ids)
        norms = runner.replay(decoder.blocks[0], Stream(inputs.hidden), inputs.calls[0], Hessian)[1]
    found = matrices(model)
    assert list(found) == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    for name, matrix in found.items():
        hessian = norms[name].hessian
        weight = decoder.projections[name].weight.detach()
        codes, scales, _ = Quantizer(hessian).quantize(weight, matrix.bits)
        rows = QuantizedWeight.encode(codes, matrix.bits, scales, None, torch.float32)
        assert torch.equal(matrix.codes, rows.codes) and torch.equal(matrix.scales, rows.scales)


@pytest.mark.usefixtures("batched")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_no_bit_depends_on_the_batches(family, ids):
    first, second = make_model(family), make_model(family)
    quantise(first, ids, batch_size=1)
    quantise(second, ids, batch_size=5)
    assert equal(first.state_dict(), second.state_dict())


class Stop(BaseException):
    pass


@pytest.mark.parametrize("moment", ["allocate", "find", "make_report", "make_sparsity_config"])
def test_what_stops_it_leaves_the_model_as_it_was(moment, ids, monkeypatch):
    model = make_model("llama")
    before = state(model)
    owner = {
        "allocate": ("optimum_neuronal.topup.rates.Rates", "allocate"),
        "find": ("optimum_neuronal.pruning.final_pass.FinalPruning", "find"),
    }.get(moment, ("optimum_neuronal.pruning.prune", moment))

    def stop(*_args, **_more):
        raise Stop

    monkeypatch.setattr(".".join(owner), stop)
    with pytest.raises(Stop):
        quantise(model, ids, embedding_bits=8)
    assert equal(before, state(model)) and not list(packed_modules(model))
    assert getattr(model.config, "sparsity_config", None) is None


def test_embeddings_and_head_go_with_it(ids, tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    model = type(make_model("llama")).from_pretrained(tmp_path)
    weight = model.lm_head.weight.detach().clone()
    pruner = quantise(model, ids, embedding_bits=8)
    assert torch.equal(model.lm_head.matrix.codes, QuantizedWeight.nearest(weight).codes)
    assert "8 bits" in str(pruner.report) and model.config.sparsity_config["embedding_bits"] == 8
    pruner.save(model, tmp_path / "packed")
    reloaded = type(model).from_pretrained(tmp_path / "packed")
    assert torch.equal(reloaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.double(), "q_proj has dtype torch.float64: with bits_per_weight, expected"),
        (lambda m: m.model.layers[1].mlp.up_proj.weight.data.fill_(torch.nan), "up_proj contain NaN"),
        (
            lambda m: setattr(m.model.layers[1].mlp.up_proj, "forward", lambda x: x),
            "whose forward was replaced has no",
        ),
    ],
)
def test_what_cannot_be_quantized_raises_before_any_work(spoil, message, ids, monkeypatch):
    model = make_model("llama")
    spoil(model)
    monkeypatch.setattr("optimum_neuronal.pruning.prune.find_changes", lambda *args: pytest.fail("work began"))
    with pytest.raises(ValueError, match=message):
        quantise(model, ids)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_all_experts_of_a_layer_are_quantized_or_none(family, ids):
    """They share a parameter, which only codes of all of them can replace."""
    model = make_model(family)
    with pytest.raises(ValueError, match="Only 3 of the 4 experts of model.layers.0.* share a parameter"):
        quantise(model, ids, ignore=[r"experts\.1\."])
    quantise(model, ids, ignore=[r"experts\."])
    assert torch.isfinite(model(ids).logits).all()
