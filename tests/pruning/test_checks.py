"""What does not fit raises before any long work."""

import pytest
import torch
import transformers
from accelerate.utils import compile_regions
from conftest import make_model
from families import FAMILIES
from torch import nn

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.checks import check_prunable, check_prune, check_weights


def skeleton():
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model("llama", **FAMILIES["llama"].config)
        return transformers.AutoModelForCausalLM.from_config(config)


def config(**fields):
    return NeuronALConfig(**{"saliency": "wanda", "sparsity": 0.5, "topup": "uniform", **fields})


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"targets": ["qqq"]}, {}, "match no projection"),
        ({"sparsity": 0.8, "pattern": "2:10"}, {}, "32 input features, not a multiple of 10"),
        ({"seq_length": 1000}, {}, "allows 2 to 64 tokens"),
        ({}, {"batch_size": 0}, "batch_size is 0: expected a whole number of at least 1"),
        ({}, {"max_hidden_bytes": -1}, "max_hidden_bytes is -1: expected a whole number of at least 0"),
    ],
)
def test_what_does_not_fit_the_model_raises_without_weights(fields, options, message):
    check_prune(skeleton(), config(), loaded=False)
    with pytest.raises(ValueError, match=message):
        check_prune(skeleton(), config(**fields), **options, loaded=False)


def compile_blocks(model):
    for layer in model.model.layers:
        layer.compile()
    return model


def compile_an_mlp(model):
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp)
    return model


@pytest.mark.parametrize(
    ("compiled", "error", "message"),
    [
        (torch.compile, TypeError, "^The model is compiled: prune the original model"),
        (compile_regions, TypeError, "^The model is compiled: prune the original model"),
        (compile_blocks, ValueError, "^model.layers.0 is compiled, .*load the model again, prune it"),
        (compile_an_mlp, ValueError, "^model.layers.1.mlp is compiled, .*load the model again, prune it"),
    ],
)
def test_compiled_models_raise(compiled, error, message):
    with pytest.raises(error, match=message):
        check_prune(compiled(make_model("llama")), config())


def test_a_sparse_model_raises():
    model = skeleton()
    model.config.sparsity_config = {"version": 1, "quant_method": "neuronal", "sparsity": 0.5}
    with pytest.raises(ValueError, match="already sparse.* del model.config.sparsity_config"):
        check_prune(model, config(), loaded=False)


def test_damaged_and_missing_weights_raise(llama):
    decoder = find_decoder(llama)
    projection = decoder.blocks[1].pruned[2]
    projection.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=f"weights of {projection.name} contain NaN"):
        check_weights(llama, decoder.projections)
    with pytest.raises(ValueError, match="on the meta device: load them with from_pretrained"):
        check_prune(skeleton(), config())


def test_weights_that_are_used_twice_raise(llama):
    """Also where one of the two uses is left out: it would be pruned too."""
    first, second = (layer.mlp for layer in llama.model.layers[:2])
    second.up_proj.weight = first.up_proj.weight
    message = r"0\.mlp\.up_proj\.weight and .*1\.mlp\.up_proj\.weight share their weights"
    for ignore in ([], [r"layers\.1\.mlp\.up_proj"]):
        with pytest.raises(ValueError, match=message):
            check_prune(llama, config(ignore=ignore))
    check_prune(llama, config(ignore=["up_proj"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.config, "quantization_config", {"quant_method": "gptq"}), "is quantized"),
        (lambda model: setattr(model.config, "is_encoder_decoder", True), "encoder-decoder"),
        (lambda model: setattr(model, "peft_config", {}), "merge_and_unload"),
    ],
)
def test_models_of_another_kind_raise(change, message, llama):
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        check_prunable(nn.Linear(2, 2))
    change(llama)
    with pytest.raises(ValueError, match=message):
        check_prunable(llama)
