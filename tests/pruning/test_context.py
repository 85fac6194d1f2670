"""Checks before any long work, records of an unfinished prune, and threads."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import make_model
from families import FAMILIES
from torch import nn

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.data.calibration import CalibrationSet
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning import context
from optimum_neuronal.pruning.context import check, check_model, check_weights, exclusive
from optimum_neuronal.pruning.prune import identity


def skeleton():
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model("llama", **FAMILIES["llama"].config)
        return transformers.AutoModelForCausalLM.from_config(config)


def config(**fields):
    return NeuronALConfig(**{"saliency": "wanda", "sparsity": 0.5, "topup": "uniform", **fields})


def test_what_does_not_fit_the_model_raises_without_weights():
    for fields, message in [
        ({"targets": ["qqq"]}, "match no projection"),
        ({"sparsity": 0.8, "pattern": "2:10"}, "32 input features, not a multiple of 10"),
        ({"seq_length": 1000}, "allows 2 to 64 tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            check(skeleton(), config(**fields), loaded=False)
    model, common = skeleton(), {"version": 1, "quant_method": "neuronal", "format": "dense"}
    model.config.sparsity_config = {**common, "sparsity": 0.5, "achieved_sparsity": 0.5}
    with pytest.raises(ValueError, match="already sparse.* del model.config.sparsity_config"):
        check(model, config(), loaded=False)


@pytest.mark.parametrize(("device", "given", "expected"), [("cpu", 3, 1), ("cuda", None, 16), ("cuda", 3, 3)])
def test_sequences_run_one_at_a_time_on_a_cpu_and_in_batches_on_an_accelerator(
    device, given, expected, llama, monkeypatch
):
    monkeypatch.setattr(context, "execution_device", lambda _: torch.device(device))
    made = check(llama, NeuronALConfig(0.5, "wanda"), batch_size=given)
    calibration = CalibrationSet(torch.zeros(32, 512, dtype=torch.int64), "test", "token ids")
    assert replace(made, calibration=calibration).runner().batch_size == expected


def test_a_refit_uses_bfloat16_where_the_cpu_multiplies_it_faster(llama, ids, monkeypatch):
    def chosen(model=llama, **fields):
        return check(model, config(**{"saliency": "sparsegpt", "refit_epochs": 1, **fields})).config.refit_dtype

    monkeypatch.setattr(context, "multiplies_bfloat16", lambda: True)
    assert chosen() == "float32", "a narrow model would gain little"
    monkeypatch.setattr(context, "WIDE", 32)
    assert chosen() == "bfloat16" and chosen(refit_dtype="float32") == "float32" and chosen(refit_epochs=0) is None
    pruner = NeuronALPruner(config(saliency="sparsegpt", refit_epochs=1, num_samples=16))
    pruner.prune(llama, torch.cat([ids, ids])[:16])
    assert pruner.report.config["refit_dtype"] == "bfloat16", "so that another machine repeats the prune"
    half = make_model("llama").bfloat16()
    assert chosen(half) is None and chosen(half, refit_dtype="bfloat16") is None, "without autocast"
    with pytest.raises(ValueError, match="refit_dtype is 'float32', but the weights are bfloat16: leave it out"):
        chosen(half, refit_dtype="float32")
    monkeypatch.setattr(context, "multiplies_bfloat16", lambda: False)
    another = make_model("llama")
    assert chosen(another) == "float32" and chosen(another, refit_dtype="bfloat16") == "bfloat16"


def test_a_second_prune_of_the_same_model_raises(llama, ids):
    pruner = NeuronALPruner(config(num_samples=12))
    with exclusive(llama.model):
        with pytest.raises(RuntimeError, match="Another thread is pruning this model: wait"):
            pruner.prune(llama, ids)
        pruner.prune(copy.deepcopy(llama), ids)
    pruner.prune(llama, ids)


def test_two_prunes_at_once_are_as_each_alone(ids):
    """With the random state, the number of threads and the models' hooks as they were."""
    fields = {"num_samples": 12, "num_alignment_samples": 4}
    configs = {
        "llama": config(saliency="alps", **fields),
        "mixtral": config(topup="neuronal", topup_args={"block_lambdas": [0.1, 0.2], "steps": "block"}, **fields),
    }

    def prune(family):
        model = copy.deepcopy(models[family])
        NeuronALPruner(configs[family]).prune(model, ids)
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        return model.state_dict()

    models = {family: make_model(family) for family in configs}
    alone = {family: prune(family) for family in configs}
    before = torch.get_num_threads(), torch.random.get_rng_state()
    with ThreadPoolExecutor(2) as executor:
        for family, found in zip(configs, executor.map(prune, configs)):
            assert all(torch.equal(value, found[name]) for name, value in alone[family].items()), family
    assert torch.get_num_threads() == before[0] and torch.equal(torch.random.get_rng_state(), before[1])


def test_a_prune_is_known_again_by_checksums(llama):
    ids = torch.arange(12).view(3, 4)

    def checksums(model=llama, ids=ids, **selection):
        return identity(model, find_decoder(model, **selection), ids)

    def changed(after):
        return [name for name in before if before[name] != after[name]]

    before = checksums()
    llama.config._name_or_path, llama.config.transformers_version = "elsewhere", "0.0"
    assert checksums(make_model("llama")) == checksums() == before
    assert before["device"] == "cpu" and {len(before[name]) for name in ("model", "calibration data")} == {64}
    other = ids.clone()
    other[2, 3] += 1
    assert changed(checksums(ids=other)) == ["calibration data"]
    assert checksums(ids=ids.T.contiguous().T) == before, "however they lie in memory"
    for row in (0, -1):
        model = make_model("llama")
        model.model.layers[2].mlp.down_proj.weight.data[row, 0] += 1
        assert changed(checksums(model)) == ["model"]
    assert changed(checksums(ignore=["k_proj"])) == ["model"]
    llama.config.rms_norm_eps *= 2
    assert changed(checksums()) == ["model"]
    assert changed(checksums(make_model("llama").bfloat16())) == ["model"]


def test_damaged_and_missing_weights_raise(llama):
    decoder = find_decoder(llama)
    projection = decoder.blocks[1].pruned[2]
    projection.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=f"weights of {projection.name} contain NaN"):
        check_weights(llama, decoder.projections)
    with pytest.raises(ValueError, match="on the meta device: load them with from_pretrained"):
        meta = llama.to("meta")
        check_weights(meta, find_decoder(meta).projections)


def test_weights_that_are_used_twice_raise(llama):
    """Also where one of the two uses is left out: it would be pruned too."""
    first, second = (layer.mlp for layer in llama.model.layers[:2])
    second.up_proj.weight = first.up_proj.weight
    message = r"0\.mlp\.up_proj\.weight and .*1\.mlp\.up_proj\.weight share their weights"
    for ignore in ([], [r"layers\.1\.mlp\.up_proj"]):
        with pytest.raises(ValueError, match=message):
            check(llama, config(ignore=ignore))
    check(llama, config(ignore=["up_proj"]))


def test_models_of_another_kind_raise(llama):
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        check_model(nn.Linear(2, 2))
    llama.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="is quantized"):
        check_model(llama)
    del llama.config.quantization_config
    llama.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="encoder-decoder"):
        check_model(llama)
    llama.peft_config = {}
    with pytest.raises(ValueError, match="merge_and_unload"):
        check_model(llama)
