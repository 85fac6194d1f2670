import pytest
import torch
import transformers
from conftest import make_model
from kinds import make_config, make_kind
from torch import nn

from optimum_neuronal.model.loading import load_model, load_skeleton
from optimum_neuronal.model.model_class import find_loader, loading_code


@pytest.mark.parametrize(
    "name, loader, tag",
    [
        ("LlavaForConditionalGeneration", "AutoModelForImageTextToText", "image-text-to-text"),
        ("Gemma3ForConditionalGeneration", "AutoModelForImageTextToText", "image-text-to-text"),
        ("LlamaForSequenceClassification", "AutoModelForSequenceClassification", "text-classification"),
        ("MistralForTokenClassification", "AutoModelForTokenClassification", "token-classification"),
        ("BertForMaskedLM", "AutoModelForMaskedLM", "fill-mask"),
        ("Qwen3Model", "AutoModel", "feature-extraction"),
        ("ElectraForPreTraining", "ElectraForPreTraining", None),
    ],
)
def test_the_class_that_the_config_names(name, loader, tag):
    assert find_loader(make_config(name)).__name__ == loader
    code = loading_code(make_kind(name))
    assert code.pipeline_tag == tag
    assert code.of("a/b", ", dtype=1") == f'{loader}.from_pretrained("a/b", dtype=1)'


def test_language_models_as_ever():
    for architectures in (["LlamaForCausalLM"], None, [], ["LLaMAForCausalLM"], ["GPT2LMHeadModel"]):
        config = transformers.LlamaConfig(architectures=architectures)
        assert find_loader(config) is transformers.AutoModelForCausalLM
    assert loading_code(make_model("gemma3_text")).pipeline_tag == "text-generation"


@pytest.mark.parametrize(
    "name", ["LlamaForRewardModel", "BertModel", "AutoModel", "pipelines", "os", "../x", "LlamaConfig"]
)
def test_what_is_no_class_of_the_config_is_refused(name):
    with pytest.raises(
        ValueError, match=f"of model_type 'llama', names the class {name!r}, and transformers has no such"
    ):
        find_loader(transformers.LlamaConfig(architectures=[name]))


def test_code_that_comes_with_a_model_needs_trust():
    config = transformers.LlamaConfig(architectures=["OwnReward"])
    config.auto_map = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForSequenceClassification": "own.OwnReward",
        "os": "own.OwnReward",
    }
    assert find_loader(config, trust_remote_code=True) is transformers.AutoModelForSequenceClassification
    with pytest.raises(ValueError, match="trust_remote_code"):
        find_loader(config)
    config.auto_map = {"os": "own.OwnReward"}
    with pytest.raises(ValueError, match="transformers has no such model"):
        find_loader(config, trust_remote_code=True)


def test_a_registered_class():
    class OwnConfig(transformers.PreTrainedConfig):
        model_type = "own"

    class OwnModel(transformers.PreTrainedModel):
        config_class = OwnConfig

    transformers.AutoModelForSequenceClassification.register(OwnConfig, OwnModel)
    config = OwnConfig(architectures=["OwnModel"])
    assert find_loader(config) is transformers.AutoModelForSequenceClassification


def test_a_class_of_the_callers_own_is_said_to_be_a_language_model():
    class Mine(type(make_model("llama"))):
        pass

    assert loading_code(Mine(make_model("llama").config)).of("x") == 'AutoModelForCausalLM.from_pretrained("x")'


def test_loaded_with_its_head_and_as_a_skeleton(tmp_path):
    model = make_kind("LlamaForSequenceClassification")
    model.save_pretrained(tmp_path)
    loaded, skeleton = load_model(tmp_path), load_skeleton(tmp_path)
    assert type(loaded) is type(skeleton) is type(model)
    assert torch.equal(loaded.score.weight, model.score.weight)
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_a_skeleton_of_what_no_auto_class_makes(tmp_path):
    make_config("ElectraForPreTraining").save_pretrained(tmp_path)
    skeleton = load_skeleton(tmp_path, "bfloat16")
    assert type(skeleton).__name__ == "ElectraForPreTraining" and skeleton.dtype == torch.bfloat16
    assert all(isinstance(weight, nn.Parameter) and weight.is_meta for weight in skeleton.parameters())
