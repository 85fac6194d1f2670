import copy
import filecmp
import json
import pickle
import shutil
from collections import Counter
from contextlib import suppress

import peft
import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from optimum_neuronal import (
    NeuronALConfig,
    NeuronALPruner,
    SparseModelForCausalLM,
    inspect_checkpoint,
    save_pretrained,
)
from optimum_neuronal.checkpoint.save_pretrained import checkpoint_tensors, save_packed_by_default


INDEX, FILE = "packed.safetensors.index.json", "packed-00001-of-00001.safetensors"


def pruned(family="llama", **overrides):
    model = make_model(family, **overrides).bfloat16()
    NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform")).prune(model)
    save_packed_by_default(model)
    return model


def names(folder):
    return {file.name for file in folder.iterdir()}


def format_told(folder):
    stored = json.loads((folder / "config.json").read_text())
    return stored["sparsity_config"]["format"], stored.get("quantization_config")


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "mixtral"])
def test_the_same_tensors_as_transformers_saves(family, tmp_path):
    """Names and values: of experts one by one, of tied weights one."""
    model = pruned(family, tie_word_embeddings=True)
    model.save_pretrained(tmp_path, format="dense")
    expected, found = load_file(tmp_path / "model.safetensors"), checkpoint_tensors(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_size_and_files(tmp_path):
    model = pruned(hidden_size=64, intermediate_size=256, vocab_size=16)
    model.save_pretrained(tmp_path)
    assert names(tmp_path) == {"config.json", "generation_config.json", FILE, INDEX}
    assert format_told(tmp_path) == ("packed", {"quant_method": "optimum_neuronal", "format": "packed", "version": 1})
    assert not hasattr(model.config, "quantization_config") and model.config.sparsity_config["format"] == "dense"
    stored = load_file(tmp_path / FILE)
    packed = {name: part for name, part in stored.items() if "_proj" in name}
    projections = [weight for name, weight in model.named_parameters() if "_proj" in name]
    assert len(packed) == 2 * len(projections)
    assert sum(part.nbytes for part in packed.values()) <= 0.37 * sum(weight.nbytes for weight in projections)
    assert torch.equal(stored["model.norm.weight"], model.model.norm.weight)


def test_either_format_again(tmp_path):
    """From a model that was loaded packed, and from one that was loaded dense; each time the same bytes."""
    pruned().save_pretrained(tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    model.save_pretrained(tmp_path / "again")
    model.save_pretrained(tmp_path / "dense", format="dense")
    save_pretrained(model, tmp_path / "by function", format="dense")
    assert "model.safetensors" in names(tmp_path / "dense") and format_told(tmp_path / "dense") == ("dense", None)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    dense.save_pretrained(tmp_path / "plain")
    save_pretrained(dense, tmp_path / "repacked", format="packed")
    for copied, original, file in [
        ("again", "packed", FILE), ("repacked", "packed", FILE), ("repacked", "packed", INDEX), ("repacked", "packed", "config.json"),
        ("by function", "dense", "model.safetensors"), ("plain", "dense", "model.safetensors"), ("plain", "dense", "config.json"),
    ]:  # fmt: skip
        assert filecmp.cmp(tmp_path / copied / file, tmp_path / original / file, shallow=False), (copied, file)


def test_one_format_replaces_the_other(tmp_path):
    model = pruned()
    (tmp_path / "notes.txt").write_text("mine")
    for format, size in (
        ("dense", "1GB"),
        ("packed", "20KB"),
        ("packed", "1GB"),
        ("dense", "20KB"),
        ("dense", "1GB"),
        ("packed", "1GB"),
    ):
        model.save_pretrained(tmp_path, format=format, max_shard_size=size)
        weights = {name for name in names(tmp_path) if "safetensors" in name}
        assert all(name.startswith("model" if format == "dense" else "packed") for name in weights), (format, weights)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, model.lm_head.weight)
    assert names(tmp_path) == {"notes.txt", "config.json", "generation_config.json", FILE, INDEX}


def test_checkpoints_of_trainer_are_dense(tmp_path):
    data = [{"input_ids": list(range(16)), "labels": list(range(16))}] * 2
    options = dict(max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(pruned(), TrainingArguments(str(tmp_path), **options), train_dataset=data)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    assert "model.safetensors" in names(checkpoint) and FILE not in names(checkpoint)
    assert format_told(checkpoint) == ("dense", None)
    trainer.model.save_pretrained(tmp_path / "by hand", True, trainer.model.state_dict())
    assert "model.safetensors" in names(tmp_path / "by hand"), "as accelerate's users call it"
    trainer.model.save_pretrained(tmp_path / "packed")
    assert FILE in names(tmp_path / "packed")
    trainer.model.save_pretrained(tmp_path / "shards", True, None, False, 20_000)
    assert "model.safetensors.index.json" in names(tmp_path / "shards")


def test_a_copy_saves_itself(tmp_path):
    model = pruned()
    other = copy.deepcopy(model).half()
    other.lm_head.weight.data.zero_()
    other.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float16 and not loaded.lm_head.weight.any()


def test_parts_and_copies_say_how_they_are_stored(tmp_path):
    """Dense weights never lie beside a config that calls them packed, whoever saves what of the model."""
    model = pruned()
    model.save_pretrained(tmp_path / "packed")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    torch.save(loaded, tmp_path / "model.pt")
    copies = {
        "pickled": pickle.loads(pickle.dumps(loaded)),
        "saved by torch": torch.load(tmp_path / "model.pt", weights_only=False),
        "copied": copy.deepcopy(loaded),
    }
    for name, other in {"pruned": model, "loaded": loaded, **copies}.items():
        other.model.save_pretrained(tmp_path / f"{name}, a part")
        type(other).save_pretrained(other, tmp_path / f"{name}, plainly")
        other.save_pretrained(tmp_path / name)
        for saved, format in ((name, "packed"), (f"{name}, a part", "dense"), (f"{name}, plainly", "dense")):
            assert format_told(tmp_path / saved)[0] == format, saved
            found = inspect_checkpoint(tmp_path / saved)
            assert found.format == format and not found.problems, saved


@pytest.mark.parametrize("format", ["packed", "dense"])
def test_compiled_models(format, tmp_path):
    """Saved is what was compiled, under its own names; a model of which a part was replaced is refused."""
    model = pruned()
    save_pretrained(model, tmp_path / "plain", format=format)
    before = {file.name: file.read_bytes() for file in (tmp_path / "plain").iterdir()}
    save_pretrained(torch.compile(model), tmp_path / "compiled", format=format)
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "compiled").iterdir()}
    model.model.layers[1] = torch.compile(model.model.layers[1])
    with pytest.raises(ValueError, match=r"model.layers.1 was replaced by .*put model.layers.1._orig_mod back"):
        save_pretrained(model, tmp_path / "plain", format=format)
    with pytest.raises(TypeError, match="got a PeftModel: expected a transformers PreTrainedModel"):
        adapted = peft.get_peft_model(make_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
        save_pretrained(adapted, tmp_path / "plain", format=format)
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "plain").iterdir()}


def test_a_model_on_disk(tmp_path):
    """Through dense files that are gone afterwards; the same bytes as from memory."""
    make_model("llama").save_pretrained(tmp_path / "dense")
    config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
    for name, options in (("memory", {}), ("disk", {"stream_to": tmp_path / "offload"})):
        pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=config, **options)
        model = pruner.quantize(tmp_path / name, format="packed")
        assert next(model.model.layers[0].parameters()).is_meta == (name == "disk")
    assert names(tmp_path / "disk") == names(tmp_path / "memory") >= {FILE, INDEX, "README.md", "neuronal_report.json"}
    memory, disk = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("memory", "disk"))
    assert all(torch.equal(disk[name], value) for name, value in memory.items())
    save_pretrained(model, tmp_path / "again", format="packed")
    assert names(tmp_path / "again") == {"config.json", "generation_config.json", FILE, INDEX}


def test_what_has_no_packed_format(tmp_path):
    model = pruned()
    for options, message in [
        ({"format": "sparse"}, "format is 'sparse': expected one of 'dense', 'packed'"),
        ({"format": "packed", "state_dict": {"a": 1}}, r"save_pretrained\(state_dict=...\) has no packed format"),
        ({"variant": "fp16"}, r"save_pretrained\(variant=...\) has no packed format: save with format='dense'"),
        ({"push_to_hub": True}, "call push_to_hub"),
        ({"max_shard_size": "many"}, "not in a valid format"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.save_pretrained(tmp_path / "model", **options)
    model.save_pretrained(tmp_path / "elsewhere", is_main_process=False)
    assert not list(tmp_path.glob("*/*")), "nothing was written"


def full_disk(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_a_save_that_fails_at_any_step_leaves_the_old_files(tmp_path, monkeypatch):
    """Of a dense model, of one that was loaded packed, and of one that computes packed; in either format."""
    old = {"dense": tmp_path / "old dense", "packed": tmp_path / "old packed"}
    for format, folder in old.items():
        save_pretrained(pruned(), folder, format)
    models = {
        "dense": AutoModelForCausalLM.from_pretrained(old["dense"]),
        "loaded packed": AutoModelForCausalLM.from_pretrained(old["packed"]),
        "computes packed": SparseModelForCausalLM.from_pretrained(old["packed"]),
    }
    steps = (
        "transformers.GenerationConfig.save_pretrained", "optimum_neuronal.checkpoint.save_pretrained.add_hint",
        "optimum_neuronal.checkpoint.weight_writers.save_file", "transformers.modeling_utils.safe_save_file",
        "an invalid generation config",
    )  # fmt: skip
    failed = Counter()
    for step in steps:
        for name, model in models.items():
            for format, other in (("dense", "packed"), ("packed", "dense"), ("packed", "packed")):
                folder = shutil.copytree(old[other], tmp_path / step / f"{name}, {format} over {other}")
                with monkeypatch.context() as patch, suppress(OSError, ValueError):
                    if step in steps[:-1]:
                        patch.setattr(step, full_disk)
                    else:
                        patch.setattr(model.generation_config, "cache_implementation", "nonsense")
                    save_pretrained(model, folder, format)
                    continue
                failed[step] += 1
                assert names(folder) == names(old[other])
                assert filecmp.cmpfiles(folder, old[other], names(folder), shallow=False)[1:] == ([], [])
    assert [failed[step] for step in steps] == [9, 6, 7, 2, 9], "all that need the step"


def test_dense_is_the_default(tmp_path):
    save_pretrained(pruned(), tmp_path)
    assert "model.safetensors" in names(tmp_path) and format_told(tmp_path) == ("dense", None)


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_size_of_shards_that_is_none(llama, tmp_path, format):
    for size in (None, 0, -5, 1.5, "x", True):
        error = ValueError if size in (0, -5, "x") else TypeError
        with pytest.raises(error, match=f"max_shard_size is {size!r}: expected bytes, or text such as '500MB'"):
            save_pretrained(llama, tmp_path / "model", format=format, max_shard_size=size)
        assert not (tmp_path / "model").exists()
