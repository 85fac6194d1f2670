"""What does not fit raises before any long work."""

import ast
import re

import pytest
import torch
import transformers
from accelerate.utils import compile_regions
from conftest import make_model
from families import FAMILIES
from peft import LoraConfig, get_peft_model
from torch import nn

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.prepare import check_prunable, check_prune, check_weights


def skeleton():
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model("llama", **FAMILIES["llama"].config)
        return transformers.AutoModelForCausalLM.from_config(config)


def config(**fields):
    return NeuronALConfig(**{"saliency": "wanda", "sparsity": 0.5, "topup": "uniform", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": ["qqq"]}, "match no projection"),
        ({"seq_length": 1000}, "allows 2 to 64 tokens"),
    ],
)
def test_what_does_not_fit_the_model_raises_without_weights(fields, message):
    check_prune(skeleton(), config(), loaded=False)
    with pytest.raises(ValueError, match=message):
        check_prune(skeleton(), config(**fields), loaded=False)


def compile_blocks(model):
    for layer in model.model.layers:
        layer.compile()
    return model


def compile_an_mlp(model):
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp)
    return model


def in_inference_mode(model):
    with torch.inference_mode():
        return make_model("llama")


def change_config(**values):
    return lambda model: model.config.update(values) or model


def delete_adapters(model):
    model.add_adapter(LoraConfig(target_modules=["q_proj"]), "lora")
    model.delete_adapter("lora")
    return model


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (torch.compile, "is compiled: load it again, prune it, and compile it"),
        (compile_regions, "is compiled"),
        (compile_blocks, "is compiled"),
        (compile_an_mlp, "is compiled"),
        (
            lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"])).model,
            r"PEFT layers: call merge_and_unload\(\) first",
        ),
        (delete_adapters, "PEFT layers"),
        (in_inference_mode, "created under torch.inference_mode: load or copy the model outside of it"),
        (change_config(quantization_config={"quant_method": "gptq"}), "is quantized"),
        (change_config(is_encoder_decoder=True), "encoder-decoder"),
    ],
)
def test_models_that_cannot_be_pruned_raise(changed, message):
    with pytest.raises(ValueError, match=message):
        check_prune(changed(make_model("llama")), config())
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        check_prunable(nn.Linear(2, 2))


def test_all_shared_weights_are_named():
    """By patterns that can be pasted: of two layers in three, then of all."""
    model = make_model("llama")
    layers = model.model.layers
    for name in ("up_proj", "down_proj"):
        setattr(layers[1].mlp, name, getattr(layers[0].mlp, name))
    ignore = follow(lambda ignore: check_prune(model, config(ignore=ignore)))
    assert ignore == [rf"model\.layers\.{i}\.mlp\.{name}_proj$" for name in ("up", "down") for i in (0, 1)]
    for name in ("up_proj", "down_proj"):
        setattr(layers[2].mlp, name, getattr(layers[0].mlp, name))
    assert follow(lambda ignore: check_prune(model, config(ignore=ignore))) == [
        r"model\.layers\.\d+\.mlp\.up_proj$", r"model\.layers\.\d+\.mlp\.down_proj$"
    ]  # fmt: skip


def test_all_projections_that_a_pattern_does_not_fit_are_named():
    """48 features divide by 16, 32 by 32."""
    model = make_model("llama")
    ignore = follow(lambda ignore: check_prune(model, config(sparsity=0.75, pattern="8:32", ignore=ignore)))
    assert ignore == [r"model\.layers\.\d+\.mlp\.down_proj$"]


def follow(attempt) -> list[str]:
    """Return the `ignore` that one error names, after which there is none."""
    with pytest.raises(ValueError) as caught:
        attempt([])
    ignore = ast.literal_eval(re.search(r"ignore=(\[.*?\])[,.]", str(caught.value))[1])
    attempt(ignore)
    return ignore


def test_all_projections_that_text_does_not_reach_are_named(ids):
    sizes = dict(decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=48, max_position_embeddings=64)
    bart = transformers.BartForCausalLM(transformers.BartConfig(vocab_size=64, d_model=32, pad_token_id=0, **sizes))
    small = {"num_samples": 4, "num_alignment_samples": 2}
    ignore = follow(lambda ignore: NeuronALPruner(config(ignore=ignore, **small)).prune(bart.eval(), ids))
    names = ("k_proj", "v_proj", "q_proj", "out_proj")
    assert ignore == [rf"model\.decoder\.layers\.\d+\.encoder_attn\.{name}$" for name in names]


def test_a_family_whose_hidden_states_are_stacked_is_not_supported(ids):
    values = {**FAMILIES["gemma3_text"].config, "num_hidden_layers": 2, "laurel_rank": 4, "num_kv_shared_layers": 0}
    values |= dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, layer_types=2 * ["full_attention"])
    values |= dict(intermediate_size=[48, 48], activation_sparsity_pattern=[0.0, 0.0], altup_num_inputs=4)
    gemma = transformers.AutoModelForCausalLM.from_config(transformers.Gemma3nTextConfig(**values))
    small = {"num_samples": 4, "num_alignment_samples": 2, "ignore": ["altup", "laurel"]}
    with pytest.raises(ValueError, match="this model family is not supported"):
        NeuronALPruner(config(**small)).prune(gemma.eval(), ids)


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
