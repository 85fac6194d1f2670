"""Saves in both formats: whole or absent, beside the user's own files, and loaded by plain transformers."""

import copy
import json
import os
import subprocess
import sys
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from conftest import make_model, make_tokenizer
from obstacles import OBSTACLES, state
from packed_models import make_zeroed
from peft import LoraConfig
from profiles import by_day
from safetensors.torch import save_file
from sparse_checkpoints import all_files, same, save_pruned, tensors_of
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from optimum_neuronal import NeuronALConfig, NeuronALPruner, convert_checkpoint, densify, save_pretrained, sparsify
from optimum_neuronal.checkpoint import converting, saving
from optimum_neuronal.model.load_model import load_model, load_streamed


CONFIG = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
RELOAD = """
import sys, warnings
warnings.simplefilter("error")
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert not any(name.startswith("optimum_neuronal") for name in sys.modules)
assert model.config.sparsity_config["sparsity"] == 0.7
ids = torch.arange(1, 33).view(2, 16)
torch.save((model(ids).logits, model.state_dict()), sys.argv[2])
"""


def pruned(family="llama", tokenizer=None):
    model, pruner = make_model(family), NeuronALPruner(CONFIG, tokenizer)
    return pruner, pruner.prune(model)


def names(folder):
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("family", by_day(["llama", "gpt2", "mixtral"], "mixtral"))
def test_plain_transformers_reloads_it(family, tmp_path):
    """A process that never imports the package: equal logits, the same zeros, and not a warning."""
    _, model = pruned(family)
    model.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", RELOAD, tmp_path / "model", tmp_path / "result.pt"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert "warn" not in result.stderr.lower() and "not initialized" not in result.stderr
    logits, weights = torch.load(tmp_path / "result.pt")
    with torch.no_grad():
        assert torch.equal(logits, model(torch.arange(1, 33).view(2, 16)).logits)
    assert same(weights, model.state_dict())


@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize("family", by_day(["llama", "mixtral"], "mixtral"))
def test_files_of_another_dtype(family, format, tmp_path):
    """As if the model had that dtype. It keeps its own."""
    _, model = pruned(family)
    other = copy.deepcopy(model).to(torch.bfloat16)
    for name, saved, dtype in (("converted", model, torch.bfloat16), ("expected", other, None)):
        save_pretrained(saved, tmp_path / name, format, "100KB", dtype=dtype)
    assert model.dtype == torch.float32 and same(tensors_of(tmp_path / "converted"), tensors_of(tmp_path / "expected"))
    found, expected = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("converted", "expected"))
    assert found.dtype == torch.bfloat16 and same(found.state_dict(), expected.state_dict())
    for index in (tmp_path / "converted").glob("*.index.json"):
        one, other = (json.loads((tmp_path / name / index.name).read_text()) for name in ("converted", "expected"))
        assert one | {"weight_map": {}} == other | {"weight_map": {}}


@pytest.mark.parametrize("way", ["whole", "streamed", "sparsified", "converted"])
def test_a_head_of_its_own_that_the_config_ties(way, tmp_path):
    """Of older merges. Its zeros are worth packing, but transformers looks for a dense weight."""
    dense = make_zeroed("llama")
    dense.lm_head.weight.data[:, ::4] = 0
    dense.lm_head.weight.data[:, 1::4] = 0
    dense.config.tie_word_embeddings = True
    head, embedding = dense.lm_head.weight.clone(), dense.model.embed_tokens.weight.clone()
    dense.save_pretrained(tmp_path / "source")
    for format in ("dense", "packed"):
        if way == "streamed":
            model = load_streamed(tmp_path / "source", torch.device("cpu"), tmp_path / "rewritten")
        else:
            model = load_model(tmp_path / "source")
        save_pretrained(sparsify(model) if way == "sparsified" else model, tmp_path / format, format)
    if way == "converted":
        convert_checkpoint(tmp_path / "dense", "packed", tmp_path / "packed", overwrite=True)
        convert_checkpoint(tmp_path / "packed", "dense", tmp_path / "dense", overwrite=True)
    for format in ("dense", "packed"):
        loaded = load_model(tmp_path / format)
        assert torch.equal(loaded.lm_head.weight, head) and torch.equal(loaded.model.embed_tokens.weight, embedding)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_what_a_model_keeps_in_float32_stays_so(format, tmp_path):
    """The routers' biases of DeepSeek."""
    _, model = pruned("deepseek_v3")
    biases = {name: value for name, value in model.state_dict().items() if name.endswith("e_score_correction_bias")}
    for value in biases.values():
        value.copy_(torch.rand(value.shape, generator=torch.Generator().manual_seed(0)))
    save_pretrained(model, tmp_path, format, dtype=torch.bfloat16)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found.dtype == torch.bfloat16 and biases
    assert all(torch.equal(found.state_dict()[name], value) for name, value in biases.items())


@pytest.mark.parametrize("dtype", ["auto", torch.float32])
@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize("family, part", [("qwen3_next", "A_log"), ("gpt_oss", "sinks"), ("mixtral", "gate.weight")])
def test_float32_tensors_among_bfloat16_ones_keep_their_dtype_and_bits(family, part, format, dtype, tmp_path):
    """transformers loads them in bfloat16, or all others in float32. Dense files may have older names."""

    def found_in(folder):
        return {name.replace("block_sparse_moe", "mlp"): t for name, t in tensors_of(tmp_path / folder).items()}

    make_model(family).bfloat16().save_pretrained(tmp_path / "dense")
    tensors = tensors_of(tmp_path / "dense")
    finer = {name: torch.randn(value.shape) for name, value in tensors.items() if part in name}
    save_file(tensors | finer, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    finer = {name: value for name, value in found_in("dense").items() if value.dtype == torch.float32}
    pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=CONFIG, dtype=dtype)
    pruner.quantize(tmp_path / "first", format=format)
    other = {"dense": "packed", "packed": "dense"}[format]
    convert_checkpoint(tmp_path / "first", other, tmp_path / "second")
    for folder in ("first", "second"):
        found = found_in(folder)
        assert {name for name, value in found.items() if value.dtype == torch.float32} == finer.keys() != set()
        assert all(torch.equal(found[name], value) for name, value in finer.items())
    model = load_model(tmp_path / "second", dtype=dtype)
    changed = model.get_parameter(next(iter(finer)))
    changed.data += 1
    save_pretrained(model, tmp_path / "trained")
    saved = found_in("trained")[next(iter(finer))]
    assert saved.dtype == torch.float32 and torch.equal(saved, changed.float())


def test_everything_lies_beside_the_weights(tmp_path, tokenizer):
    pruner, model = pruned(tokenizer=tokenizer)
    pruner.save(model, tmp_path / "new" / "model")
    folder = tmp_path / "new" / "model"
    assert {"config.json", "model.safetensors", "tokenizer.json", "neuronal_report.json", "README.md"} <= names(folder)
    report = json.loads((folder / "neuronal_report.json").read_text())
    assert report | json.loads(json.dumps(pruner.report.to_dict())) == report
    stored = json.loads((folder / "config.json").read_text())
    assert stored["sparsity_config"]["achieved_sparsity"] == pruner.report.achieved_sparsity
    assert "quantization_config" not in stored and names(tmp_path / "new") == {"model"}


@pytest.mark.parametrize("make", ["dense", "packed"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "mixtral"])
def test_a_packed_model_saves_what_the_dense_one_does(family, make, tmp_path):
    """`save_pretrained` writes the same dense files, with the names of the family; ours the same packed ones."""
    _, model = pruned(family)
    model.save_pretrained(tmp_path / "dense")
    save_pretrained(model, tmp_path / "packed", format="packed")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "packed") if make == "packed" else sparsify(model)
    other.save_pretrained(tmp_path / "dense again")
    save_pretrained(other, tmp_path / "packed again", format="packed")
    for name in ("dense", "packed"):
        assert same(tensors_of(tmp_path / name), tensors_of(tmp_path / f"{name} again")), name
        configs = [(tmp_path / folder / "config.json").read_text() for folder in (name, f"{name} again")]
        assert json.loads(configs[0]) == json.loads(configs[1])


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_model_of_which_a_part_is_packed(format, tmp_path):
    _, model = pruned()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    sparsify(model.model)
    save_pretrained(model, tmp_path, format)
    assert same(densify(AutoModelForCausalLM.from_pretrained(tmp_path)).state_dict(), expected)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_weights_that_would_be_lost_are_not_saved(format, tmp_path):
    """They would be random numbers when the model is loaded. With adapters, transformers would write those alone."""
    (pruner, adapted), pruned_by_torch, compiled = pruned(), make_model("llama"), make_zeroed("llama")
    adapted.add_adapter(LoraConfig(target_modules=["q_proj"]))
    prune.l1_unstructured(pruned_by_torch.model.layers[0].mlp.up_proj, "weight", 0.7)
    compiled.model.layers[0] = torch.compile(compiled.model.layers[0])
    short = make_zeroed("llama")
    del short.model.layers[2]
    for save, model, message in (
        (pruner.save, adapted, "q_proj.weight would be lost: first merge adapters"),
        (save_pretrained, adapted, "q_proj.weight would be lost: first merge adapters"),
        (save_pretrained, pruned_by_torch, "^model.layers.0.mlp.up_proj.weight would be lost: .*unwrap compiled"),
        (save_pretrained, compiled, "^model.layers.0.input_layernorm.weight, .* and 6 more would be lost: "),
        (save_pretrained, short, "^model.layers.2.input_layernorm.weight, .* and 6 more would be lost: "),
    ):
        with pytest.raises(ValueError, match=message):
            save(model, tmp_path / "model", format)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_packed_weight_of_a_finer_dtype_is_saved_again(dtype, tmp_path):
    """In its dtype, although transformers loads it in that of the others."""
    name = "model.layers.0.mlp.up_proj"
    make_zeroed("llama").bfloat16().save_pretrained(tmp_path / "dense")
    tensors = tensors_of(tmp_path / "dense")
    tensors[f"{name}.weight"] = torch.rand(tensors[f"{name}.weight"].shape) * (tensors[f"{name}.weight"] != 0)
    save_file(tensors, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    save_pretrained(load_model(tmp_path / "dense"), tmp_path / "first", "packed")
    model = load_model(tmp_path / "first", dtype=torch.float32 if dtype else torch.bfloat16)
    save_pretrained(model, tmp_path / "second", "packed", dtype=dtype)
    first, second = tensors_of(tmp_path / "first"), tensors_of(tmp_path / "second")
    assert same(first, second) and first[f"{name}.packed_values"].dtype == torch.float32
    load_model(tmp_path / "second")


def test_the_packed_format_has_no_float64(tmp_path):
    pruner, model = pruned()
    with pytest.raises(ValueError, match="does not support torch.float64: expected one of torch.bfloat16"):
        save_pretrained(model, tmp_path, "packed", dtype=torch.float64)
    pruner.save(model, tmp_path, "dense", torch.float64)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float64


def test_checkpoints_of_trainer_are_dense(tmp_path):
    save_pruned(tmp_path / "packed", format="packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    options = dict(report_to=[], use_cpu=True, disable_tqdm=True)
    Trainer(model, TrainingArguments(str(tmp_path), **options)).save_model(tmp_path / "saved")
    assert "model.safetensors" in names(tmp_path / "saved") and not list((tmp_path / "saved").glob("packed*"))
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_model_that_could_not_be_saved_is_found_before_the_work(format, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "dense")
    pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=CONFIG)
    pruner.model.generation_config.num_return_sequences = 3
    with pytest.raises(ValueError, match="cannot be saved: .*`num_return_sequences` different than 1"):
        pruner.quantize(tmp_path / "sparse", format=format)
    assert pruner.report is None and not hasattr(pruner.model.config, "sparsity_config")


@pytest.mark.parametrize(
    ("format", "step"),
    [("dense", "checkpoint.writing.save_file"), ("packed", "checkpoint.packed_files.save_file"), ("dense", "report.PruningReport.save")],
)  # fmt: skip
def test_a_save_that_fails_leaves_the_old_files(format, step, tmp_path, monkeypatch):
    save_pruned(tmp_path / "model", "gpt2")
    before, (pruner, model) = all_files(tmp_path), pruned()
    monkeypatch.setattr(f"optimum_neuronal.{step}", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="^Saving to .*/model failed, and nothing was changed there: .*No space left"):
        pruner.save(model, tmp_path / "model", format, overwrite=True)
    assert all_files(tmp_path) == before


def writers(folder):
    """Every function of Python that writes a model: `write(directory, **how)`."""
    save_pruned(folder / "sparse")
    pruner, model = pruned()

    def quantize(directory, **how):
        make_model("llama").save_pretrained(folder / "dense")
        pruner = NeuronALPruner.from_pretrained(folder / "dense", config=CONFIG)
        try:
            pruner.quantize(directory, **how)
        except FileExistsError:
            assert how or pruner.report is None, "it is refused before the pruning run"
            raise

    return {
        "quantize": quantize,
        "save": partial(pruner.save, model),
        "save_pretrained": partial(save_pretrained, model),
        "convert": partial(convert_checkpoint, folder / "sparse", "packed"),
    }


@pytest.mark.parametrize("writer", ["quantize", "save", "save_pretrained", "convert"])
def test_a_model_is_replaced_only_on_request_and_then_as_a_whole(writer, tmp_path):
    write, old = writers(tmp_path)[writer], tmp_path / "model"
    save_pruned(old, "gpt2", make_tokenizer(chat_template={"default": "{{ messages }}", "tool": "{{ tools }}"}))
    (old / "notes.txt").write_text("mine")
    before = all_files(old)
    said = r"files of a model: .*--overwrite \(overwrite=True\)"
    with pytest.raises(FileExistsError, match=said):
        write(old)
    assert all_files(old) == before
    write(tmp_path / "other")
    write(old, overwrite=True)
    assert names(old) == names(tmp_path / "other")
    with pytest.raises(FileExistsError, match="which is read|not a model's directory"):
        write(tmp_path, overwrite=True)


@pytest.mark.parametrize("kind", OBSTACLES)
@pytest.mark.parametrize("writer", ["quantize", "save", "save_pretrained", "convert"])
def test_what_appears_during_the_work_stays(writer, kind, tmp_path, monkeypatch):
    write, path = writers(tmp_path)[writer], tmp_path / "model"
    module = converting if writer == "convert" else saving

    def appears(*given, make=module.write_model):
        make(*given)
        OBSTACLES[kind](path)
        before.extend(state(path))

    before = []
    monkeypatch.setattr(module, "write_model", appears)
    with pytest.raises(FileExistsError, match="model was not written.*The complete result is in") as error:
        write(path, overwrite=True)
    assert state(path) == before
    load_model(tmp_path / str(error.value).rstrip(".").rpartition(os.sep)[2])
