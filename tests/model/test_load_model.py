import pytest
import torch
import transformers
from conftest import make_model, make_tokenizer
from kinds import make_config, make_kind
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sparse_checkpoints import change_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from optimum_neuronal import NeuronALConfig, NeuronALPruner, evaluate_perplexity
from optimum_neuronal.model.auto_classes import PIPELINE_TAGS, find_loader, loading_class, loading_code
from optimum_neuronal.model.load_model import (
    check_unquantized,
    load_model,
    load_skeleton,
    load_streamed,
    streamed_device_map,
)
from optimum_neuronal.model.origin import find_tokenizer, hub_id, own_tokenizer, public_name


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "family, format", [("llama", "dense"), ("llama", "packed"), ("gpt2", "dense"), ("mixtral", "dense")]
)
def test_a_streamed_model_is_pruned_and_saved_like_any_other(family, format, ids, tmp_path):
    make_model(family).save_pretrained(tmp_path / "dense")
    fields = dict(topup="neuronal", topup_args={"block_lambdas": [0.1], "row_lambdas": [0, 0.1]}, saliency="wanda")
    config = NeuronALConfig(0.7, num_samples=12, num_alignment_samples=4, **fields)
    results = {}
    for name, options in (("streamed", {"stream_to": tmp_path / "rewritten", "device": CPU}), ("whole", {})):
        pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=config, **options)
        in_memory = [key for key, parameter in pruner.model.named_parameters() if not parameter.is_meta]
        tied = ["wte", "wpe", "ln_f"] if family == "gpt2" else []
        assert name == "whole" or {key.split(".")[1] for key in in_memory} == set(tied)
        pruner.quantize(tmp_path / name, format=format, dataset=ids)
        results[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
    assert all(torch.equal(value, results["whole"][key]) for key, value in results["streamed"].items())


@pytest.mark.parametrize("suffix, stored", [("safetensors", "once"), ("safetensors", "twice"), ("bin", "twice")])
def test_a_tied_head_is_saved_once(stored, suffix, ids, tmp_path):
    """Also from files of older releases that hold it twice, and after forward passes of the whole model."""
    source, model = tmp_path / "source", make_model("llama", tie_word_embeddings=True)
    model.save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    if stored == "twice":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    if suffix == "bin":
        (source / "model.safetensors").unlink()
        torch.save(tensors, source / "pytorch_model.bin")
    config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
    pruner = NeuronALPruner.from_pretrained(source, config=config, stream_to=tmp_path / "rewritten", device=CPU)
    with torch.no_grad():
        assert torch.equal(pruner.model(ids).logits, model(ids).logits)
    pruner.prune(pruner.model)
    for format in ("dense", "packed"):
        pruner.save(pruner.model, tmp_path / format, format)
        (path,) = (tmp_path / format).glob("*.safetensors")
        assert "lm_head.weight" not in load_file(path)


def test_on_an_accelerator_only_the_blocks_stay_on_disk(tmp_path):
    device = torch.device("cuda", 0)
    lists = {"llama": "model.layers", "gpt2": "transformer.h", "gemma3": "model.language_model.layers"}
    for family, blocks in lists.items():
        model = make_model(family)
        model.base_model.image_newline = torch.nn.Parameter(torch.ones(2))  # as Llava's
        model.get_submodule(blocks)[0].novel = torch.nn.Linear(2, 2)  # which the config of a pruning run may ignore
        placed = streamed_device_map(model, device)
        assert [name for name, place in placed.items() if place == "disk"] == [blocks]
        for name, _ in model.named_parameters():
            holders = [place for place in placed if f"{name}.".startswith(f"{place}.")]
            assert len(holders) == 1, name
    save_file({"weight": torch.ones(1)}, tmp_path / "any.safetensors")
    for place in set(placed.values()) - {"disk"}:
        with safe_open(tmp_path / "any.safetensors", framework="pt", device=place) as file:  # as accelerate does
            assert list(file.keys()) == ["weight"]


def test_a_skeletons_dtype_is_the_configs_or_the_users(tmp_path):
    config = make_model("llama").config
    for own, asked, expected in [
        (torch.bfloat16, "auto", torch.bfloat16),
        (None, "auto", torch.float32),
        (torch.bfloat16, "float16", torch.float16),
        (torch.bfloat16, torch.float64, torch.float64),
    ]:
        config.dtype = own
        config.save_pretrained(tmp_path)
        assert load_skeleton(tmp_path, asked).dtype == expected


def test_the_class_that_the_config_names():
    for name, loader, tag in (
        ("LlavaForConditionalGeneration", "AutoModelForImageTextToText", "image-text-to-text"),
        ("Gemma3ForConditionalGeneration", "AutoModelForImageTextToText", "image-text-to-text"),
        ("LlamaForSequenceClassification", "AutoModelForSequenceClassification", "text-classification"),
        ("MistralForTokenClassification", "AutoModelForTokenClassification", "token-classification"),
        ("BertForMaskedLM", "AutoModelForMaskedLM", "fill-mask"),
        ("Qwen3Model", "AutoModel", "feature-extraction"),
        ("ElectraForPreTraining", "AutoModelForPreTraining", None),
    ):
        assert find_loader(make_config(name)).__name__ == loader
        assert PIPELINE_TAGS.get(loading_class(make_kind(name))) == tag
        assert loading_code(make_kind(name), "a/b") == f'{loader}.from_pretrained("a/b")'


def test_an_unknown_class_in_the_config_raises():
    for name in ("LlamaForRewardModel", "BertModel", "AutoModel", "pipelines", "os", "../x", "LlamaConfig"):
        with pytest.raises(ValueError, match=rf"\(model_type 'llama'\) names the class {name!r}: no Auto class"):
            find_loader(transformers.LlamaConfig(architectures=[name]))


def test_code_that_comes_with_a_model_needs_trust():
    config = transformers.LlamaConfig(architectures=["OwnReward"])
    config.auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnReward"}
    assert find_loader(config, trust_remote_code=True) is transformers.AutoModelForSequenceClassification
    with pytest.raises(ValueError, match="trust_remote_code"):
        find_loader(config)
    config.auto_map = {"os": "own.OwnReward"}
    with pytest.raises(ValueError, match="no Auto class for text loads it"):
        find_loader(config, trust_remote_code=True)


def test_names_hold_no_folder_and_what_lies_here_is_on_the_hub_only_in_its_cache(llama, tmp_path, monkeypatch):
    cached = ("models--meta--llama-3/snapshots/0123abc", "models--gpt2/snapshots/0123abc")
    for folder in ("here", *cached):
        (tmp_path / "own" / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "own")
    for origin, on_the_hub, name in (
        ("meta/llama", "meta/llama", "meta/llama"),
        ("", None, "LlamaForCausalLM"),
        ("a/b/c", None, "c"),
        ("../my dense/", None, "my dense"),
        ("here", None, "here"),
        (".", None, "own"),
        (cached[0], "meta/llama-3", "meta/llama-3"),
        (cached[1], "gpt2", "gpt2"),
    ):
        llama.config._name_or_path = origin
        assert (hub_id(llama), public_name(llama)) == (on_the_hub, name)


def without(folder, *parts):
    """Take tensors whose names contain one of some parts out of a checkpoint of one file."""
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if not any(part in name for part in parts)}  # noqa: SIM118
        save_file(kept, path, file.metadata())


def test_weights_that_a_checkpoint_lacks_are_not_made_up(ids, tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    without(tmp_path, "layers.1.mlp", "layers.0.self_attn.v_proj")
    config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
    lacks = "lacks model.layers.0.self_attn.v_proj.weight, model.layers.1.mlp.down_proj.weight, .* and 1 more, which"
    for load in (
        lambda: load_model(tmp_path),
        lambda: load_streamed(tmp_path, CPU, tmp_path / "rewritten"),
        lambda: NeuronALPruner.from_pretrained(tmp_path, config=config),
        lambda: evaluate_perplexity(tmp_path, dataset=ids),
    ):
        with pytest.raises(ValueError, match=lacks):
            load()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"", "A weights file of .* is damaged: .*header too small"),
        ("model.safetensors", b"\xff" * 100, "A weights file of .* is damaged"),
        ("model.safetensors.index.json", b"{", "model.safetensors.index.json is damaged"),
        ("model.safetensors.index.json", b'{"weight_map": [1], "metadata": {}}', "index.json is damaged"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}', "index.json is damaged"),
        ("pytorch_model.bin.index.json", b'{"weight_map": {"a": "../b.bin"}, "metadata": {}}', "names '../b.bin'"),
    ],
)
def test_damaged_files_are_named(file, content, message, tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "32"}, "The config of .* is damaged: .*hidden_size"),
        ({"dtype": "x"}, "The config of .* is damaged: .*no attribute 'x'"),
        ({"architectures": [5]}, "names the class '5'|Field 'architectures' with value"),
        ({"quantization_config": "x"}, r"is already quantized \(x\)"),
    ],
)
def test_a_damaged_config_is_named(change, message, tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    change_config(tmp_path, lambda config: config.update(change))
    with pytest.raises(ValueError, match=message):
        check_unquantized(tmp_path)
        find_tokenizer(tmp_path)
        load_model(tmp_path)


def test_a_tokenizer_without_words_is_none(tmp_path):
    """transformers makes one for families such as Gemma if there are no files."""
    make_model("gemma2").save_pretrained(tmp_path)
    assert find_tokenizer(tmp_path) is None
    message = "needs a tokenizer: pass .* None could be loaded from .*: its files are missing"
    with pytest.raises(ValueError, match=message):
        own_tokenizer(load_model(tmp_path))
    make_tokenizer().save_pretrained(tmp_path)
    assert find_tokenizer(tmp_path)("w7")["input_ids"] == own_tokenizer(load_model(tmp_path))("w7")["input_ids"] == [7]


def test_tied_weights_are_stored_once_and_a_new_head_is_new(tmp_path):
    config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
    make_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    load_model(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    AutoModelForSequenceClassification.from_pretrained(tmp_path, quantization_config=config)
    without(tmp_path, "embed_tokens")  # both places of the tied weight are empty now
    with pytest.raises(ValueError, match="lacks .*embed_tokens"):
        load_model(tmp_path)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_the_attention_is_the_callers_or_transformers_choice_not_the_checkpoints(key, tmp_path):
    """Which may not be installed here."""
    make_model("llama").save_pretrained(tmp_path)
    change_config(tmp_path, lambda config: config.update({key: "flash_attention_2"}))
    for load in (load_model, load_skeleton):
        assert load(tmp_path).config._attn_implementation == "sdpa"
        assert load(tmp_path, attn_implementation="eager").config._attn_implementation == "eager"
