import copy
import json
import os
import pathlib
import signal

import pytest
import torch
from conftest import make_model
from optimum.quantization_base import OptimumQuantizer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from optimum_neuronal import NeuronALConfig, NeuronALPruner, densify
from optimum_neuronal import pruner as pruner_module
from optimum_neuronal.evaluation import perplexity
from optimum_neuronal.files.records import work_directory
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning import prune as prune_module


LAMBDAS = {"block_lambdas": (0.05, 0.15), "row_lambdas": (0.0, 0.1)}
FAST = {"topup": "neuronal", "num_samples": 12, "num_alignment_samples": 4, "topup_args": LAMBDAS}


def config(sparsity=0.7, **fields):
    own = {} if fields.get("topup", "neuronal") == "neuronal" else {"topup_args": {}}
    return NeuronALConfig(sparsity, **{"saliency": "wanda", **FAST, **own, **fields})


def state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_both_steps(any_model, ids):
    before = state(any_model)
    for reference, model in (("sparse-stream", copy.deepcopy(any_model)), ("dense", any_model)):
        pruner = NeuronALPruner(config(topup_args={**LAMBDAS, "reference": reference}))
        assert pruner.prune(model, ids) is model
        projections = find_decoder(model).projections.values()
        owners = {id(p.owner) for p in projections}
        zeros = sum((p.weight == 0).sum().item() for p in projections)
        assert zeros / sum(p.weight.numel() for p in projections) == pytest.approx(0.7, abs=1e-3)
        assert pruner.report.achieved_sparsity == zeros / sum(p.weight.numel() for p in projections)
        for key, value in model.named_parameters():
            kept = value != 0 if id(value) in owners else slice(None)
            assert torch.equal(value[kept], before[key][kept]), "what is kept is kept as it was"


def test_magnitude_uniform_equals_torch():
    """Per row, against torch.nn.utils.prune."""
    model = make_model("llama")
    linear = model.model.layers[1].mlp.down_proj
    expected = linear.weight.detach().clone()
    counts = torch.diff(torch.floor(torch.arange(33) * 48 * 0.7 + 1e-4)).long()
    for row in range(32):
        single = torch.nn.Linear(48, 1, bias=False)
        single.weight.data = expected[row : row + 1].clone()
        prune.l1_unstructured(single, "weight", amount=int(counts[row]))
        expected[row] = single.weight[0].detach()
    NeuronALPruner(config(saliency="magnitude", topup="uniform")).prune(model)
    assert torch.equal(linear.weight, expected)


def test_the_same_seed_gives_the_same_masks(ids, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{(i * 7) % 60}" for i in range(2000)))
    results = []
    for seed, batch_size in ((0, 1), (0, 4), (1, 1)):
        model = make_model("llama", vocab_size=256)
        fields = {"seed": seed, "dataset": str(text), "seq_length": 16}
        NeuronALPruner(config(**fields), tokenizer).prune(model, batch_size=batch_size)
        results.append(state(model))
    assert all(torch.equal(value, results[1][key]) for key, value in results[0].items())
    assert any(not torch.equal(value, results[2][key]) for key, value in results[0].items())


@pytest.mark.parametrize("seq_length", [2, 16])
def test_of_the_batch_size_values_know_by_rounding_at_most(ids, seq_length):
    """A forward of two tokens rounds otherwise than one of many, which is what is promised, and no more."""
    results = []
    for batch_size in (1, 3, 12):
        model = make_model("llama")
        fields = {"saliency": "sparsegpt", "topup": "uniform", "topup_args": {}}
        NeuronALPruner(config(**fields)).prune(model, ids[:, :seq_length], batch_size=batch_size)
        results.append(state(model))
    for found in results[1:]:
        for key, value in found.items():
            torch.testing.assert_close(value, results[0][key], rtol=1e-3, atol=1e-4)
            assert torch.equal(value == 0, results[0][key] == 0)
    assert "rounding at most" in NeuronALPruner.prune.__doc__


def test_the_report_tells_everything(llama, ids):
    pruner = NeuronALPruner(config())
    pruner.prune(llama, ids)
    report = json.loads(json.dumps(pruner.report.to_dict()))
    assert report["requested_sparsity"] == 0.7 and len(report["blocks"]) == 3 and len(report["projections"]) == 21
    smallest = min(p["smallest_row"] for p in report["projections"].values())
    largest = max(p["largest_row"] for p in report["projections"].values())
    assert smallest < 0.6 < 0.8 < largest
    for step in ("block", "row"):
        candidates = report["decisions"][step]["candidates"]
        best = min(candidates, key=lambda candidate: candidate["error"])
        assert report[f"{step}_lambda"] == best["lambda"] == report["decisions"][step]["lambda"]
    assert report["calibration"]["num_samples"] == 12 and report["calibration"]["seq_length"] == 16
    assert set(report["seconds"]) == {"calibration data", "allocation", "pruning"}
    assert report["peak_memory"]["host"] > 0 and report["block_forwards"] > 0
    assert report["versions"]["torch"] == torch.__version__
    short = llama.config.sparsity_config
    assert all(short[name] == report[name] for name in ("achieved_sparsity", "block_lambda"))
    assert NeuronALConfig.from_dict(short["config"]) == config()
    text = str(pruner.report)
    assert "lambda of the row step" in text and "12 x 16 tokens" in text


@pytest.mark.parametrize("name, column", [("text.txt", "")])
def test_the_report_keeps_folders_to_itself(tokenizer, tmp_path, name, column):
    text = tmp_path / name
    words = " ".join(f"w{(i * 7) % 60}" for i in range(2000))
    text.write_text(json.dumps({"words": words}) if column else words)
    model = make_model("llama", vocab_size=256)
    pruner = NeuronALPruner(config(dataset=str(text) + column, seq_length=16, topup="uniform"), tokenizer)
    pruner.prune(model)
    source = f"{name}, column words" if column else name
    assert pruner.report.calibration["source"] == source and pruner.report.config["dataset"] == name + column
    assert str(tmp_path) not in json.dumps([pruner.report.to_dict(), model.config.sparsity_config])


def test_the_interface_of_optimum(tmp_path, ids):
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    make_model("llama").save_pretrained(dense)
    pruner = NeuronALPruner.from_pretrained(dense, config=config(topup="uniform"))
    assert isinstance(pruner, OptimumQuantizer) and pruner.tokenizer is None
    model = pruner.quantize(sparse, dataset=ids)
    reloaded = AutoModelForCausalLM.from_pretrained(sparse)
    assert torch.equal(reloaded(ids).logits, model(ids).logits)
    assert NeuronALPruner.from_dict(pruner.to_dict()).config == pruner.config


@pytest.mark.parametrize("format", ["packed", "dense"])
def test_quantised_weights_are_those_of_the_model_in_memory(tmp_path, ids, format):
    """So what is measured on it holds for what is saved."""
    make_model("llama").bfloat16().save_pretrained(tmp_path / "dense")
    own = NeuronALConfig(bits_per_weight=6.0, topup="uniform", num_samples=12, num_alignment_samples=4)
    pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=own)
    model = pruner.quantize(tmp_path / "few", dataset=ids, format=format, evaluate={"own": ids})
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "few")
    if format == "packed":
        assert all(torch.equal(value, reloaded.state_dict()[name]) for name, value in model.state_dict().items())
    dense, found = (densify(each).state_dict() for each in (model, reloaded))
    assert all(torch.equal(value, found[name]) for name, value in dense.items())
    assert model.config.sparsity_config["bits_per_weight"] == pruner.report.bits_per_weight <= 6
    assert pruner.report.evaluation["own"].keys() == {"dense", "pruned"} and "6 bits" in repr(pruner)


@pytest.fixture
def from_disk(tmp_path):
    """Makes a pruner of a model on disk; and tells whether it has pruned."""
    make_model("llama").save_pretrained(tmp_path / "dense")
    fields = {"saliency": "magnitude", "topup": "uniform"}
    return lambda: NeuronALPruner.from_pretrained(tmp_path / "dense", config=config(**fields))


@pytest.mark.parametrize("work, output", [("w", "w"), ("w", "w/model"), ("o/w", "o"), ("link", "w/model")])
def test_a_work_directory_that_overlaps_the_output_is_refused_before_the_work(from_disk, tmp_path, work, output):
    (tmp_path / "link").symlink_to("w")
    pruner = from_disk()
    with pytest.raises(ValueError, match="The work directory .* the output .*: name another"):
        pruner.quantize(tmp_path / output, work_dir=tmp_path / work)
    assert pruner.report is None and sorted(os.listdir(tmp_path)) == ["dense", "link"]


@pytest.mark.parametrize("work", [".", "link"])
def test_of_the_work_directory_only_its_own_is_removed(from_disk, tmp_path, monkeypatch, work):
    """The working directory, or a link to another: the model is saved, and the user's files are where they were."""
    (tmp_path / "w").mkdir()
    (tmp_path / "link").symlink_to("w")
    monkeypatch.chdir(tmp_path / "w" if work == "." else tmp_path)
    pruner = from_disk()
    monkeypatch.setattr(pruner, "save", lambda *args: (tmp_path / "w" / "notes").write_text("mine"))
    pruner.quantize(tmp_path / "model", work_dir=work)
    assert os.listdir(tmp_path / "w") == ["notes"] and (tmp_path / "link").is_symlink()


def test_two_prunes_with_one_work_directory(llama, ids, tmp_path):
    before = state(llama)
    told = "work is in use by another prune"
    with work_directory(tmp_path / "work"), pytest.raises(BlockingIOError, match=told):
        NeuronALPruner(config()).prune(llama, ids, tmp_path / "work")
    assert all(torch.equal(value, before[key]) for key, value in llama.state_dict().items())
    NeuronALPruner(config(topup="uniform")).prune(llama, ids, tmp_path / "work")


def test_the_work_directory_is_held_until_the_model_is_saved(from_disk, tmp_path, monkeypatch):
    pruner, refused = from_disk(), []

    def second(*_args):
        with pytest.raises(BlockingIOError) as caught:
            from_disk().quantize(tmp_path / "other", work_dir=tmp_path / "work")
        refused.append(caught.value)

    monkeypatch.setattr(pruner, "save", second)
    pruner.quantize(tmp_path / "model", work_dir=tmp_path / "work")
    assert refused and not (tmp_path / "work").exists()


def saved_with_own_tokenizer(folder, offset):
    """A dense checkpoint with a tokenizer of its own, in which the word "w7" is another id."""
    make_model("llama", vocab_size=256).save_pretrained(folder)
    words = {f"w{i}": (i + offset) % 255 for i in range(255)} | {"<unk>": 255}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_every_model_has_its_own_tokenizer(tmp_path):
    text, fields = [" ".join(f"w{i % 60}" for i in range(400))], {"topup": "uniform", "seq_length": 16}
    first, second = (saved_with_own_tokenizer(tmp_path / f"{offset}", offset) for offset in (0, 5))
    expected = NeuronALPruner(config(**fields))
    expected.prune(copy.deepcopy(second), text)
    pruner = NeuronALPruner(config(**fields))
    for model in (first, second):
        pruner.prune(model, text)
    assert pruner.report.calibration == expected.report.calibration
    assert pruner.tokenizer.get_vocab()["w7"] == 12
    pruner.save(second, tmp_path / "second sparse")
    pruner.save(first, tmp_path / "first sparse")  # though the other one was pruned since
    for name, number in (("first", 7), ("second", 12)):
        assert AutoTokenizer.from_pretrained(tmp_path / f"{name} sparse").get_vocab()["w7"] == number
    untold = make_model("llama")
    pruner.prune(untold, torch.zeros(12, 16, dtype=torch.int64))
    assert pruner.tokenizer is None
    loaded = NeuronALPruner.from_pretrained(tmp_path / "0", config=config(**fields))
    assert loaded.tokenizer.get_vocab()["w7"] == 7
    loaded.prune(AutoModelForCausalLM.from_pretrained(tmp_path / "5"), text)
    assert loaded.tokenizer.get_vocab()["w7"] == 12


def test_a_tokenizer_is_looked_for_where_its_model_is(tmp_path, monkeypatch):
    make_model("llama").save_pretrained(tmp_path)
    asked = {}
    monkeypatch.setattr(pruner_module, "find_tokenizer", lambda path, **options: asked.update(options))
    options = {"cache_dir": str(tmp_path / "cache"), "local_files_only": True, "revision": "main"}
    NeuronALPruner.from_pretrained(tmp_path, config=config(), dtype="float32", **options)
    assert asked == options


def test_quantize_tells_of_test_files_of_the_same_name(tmp_path, ids, monkeypatch):
    saved_with_own_tokenizer(tmp_path / "dense", 0)
    for folder, count in (("a", 3), ("b", 60)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.txt").write_text(" ".join(f"w{i % count}" for i in range(64)))
    pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=config(topup="uniform", seq_length=16))
    files = (tmp_path / folder / "test.txt" for folder in ("a", "b"))
    with pytest.raises(TypeError, match="evaluate is 'wikitext2': expected a list"):
        pruner.quantize(tmp_path / "sparse", dataset=ids, evaluate="wikitext2")
    read, load = [], perplexity.load_documents
    monkeypatch.setattr(perplexity, "load_documents", lambda name, *more: read.append(name) or load(name, *more))
    pruner.quantize(tmp_path / "sparse", dataset=ids, evaluate=files)
    assert len(read) == 2, "each once, for both measurements"
    first, second = (pruner.report.evaluation[name] for name in ("test.txt", "test.txt (2)"))
    assert first["dense"] != second["dense"] and first["pruned"] != second["pruned"]


def test_saved_is_only_what_was_pruned_here(tmp_path, ids):
    """The report, and so the model card, are those of the model that is saved."""
    pruner, first = NeuronALPruner(config(0.5, topup="uniform")), make_model("llama")
    second = make_model("llama", seed=1)
    pruner.prune(first, ids)
    for other in (second, NeuronALPruner(config(0.7, topup="uniform")).prune(second, ids)):
        with pytest.raises(ValueError, match="not as this pruner has left it"):
            pruner.save(other, tmp_path / "other")
        with pytest.raises(ValueError, match="not as this pruner has left it"):
            pruner.push_to_hub(other, "me/other")
    assert not (tmp_path / "other").exists()
    of_first, third = pruner.report, pruner.prune(make_model("llama", seed=2), ids.flip(0))
    for model, report in ((third, pruner.report), (first, of_first), (copy.deepcopy(first), of_first)):
        pruner.save(model, tmp_path / "saved")
        saved = json.loads((tmp_path / "saved" / "neuronal_report.json").read_text())
        assert saved == {**json.loads(json.dumps(report.to_dict())), "files": saved["files"]}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_config_shared_by_two_models_is_not_written_to(family, ids):
    first = make_model(family)
    second = type(first)(first.config).eval()
    assert second.config is first.config
    expected = second(ids).logits
    NeuronALPruner(config(topup="uniform")).prune(first, ids)
    assert first.config.sparsity_config["sparsity"] == 0.7 and not hasattr(second.config, "sparsity_config")
    assert all(module.config is first.config for module in first.modules() if hasattr(module, "config"))
    assert torch.equal(second(ids).logits, expected)
    NeuronALPruner(config(topup="uniform")).prune(second, ids)


def test_misuse_of_the_interface(llama, tmp_path):
    pruner = NeuronALPruner(config())
    with pytest.raises(TypeError, match="config is a dict: expected a NeuronALConfig"):
        NeuronALPruner({"sparsity": 0.7})
    with pytest.raises(ValueError, match="no model to prune"):
        pruner.quantize(tmp_path)
    with pytest.raises(ValueError, match="pruned nothing yet"):
        pruner.save(llama, tmp_path)
    with pytest.raises(ValueError, match="file_prefix"):
        pruner.quantize(tmp_path, "prefix")
    with pytest.raises(ValueError, match="file_name"):
        NeuronALPruner.from_pretrained(tmp_path, "model.bin", config=config())


@pytest.mark.parametrize(
    "fields, dataset, message",
    [
        ({}, None, "No calibration data"),
        ({}, "ids+1000", "Token ids range from"),
        ({"num_samples": 13}, "ids", "there are 12 sequences"),
        ({"seq_length": 65}, "ids", "allows 1 to 64 tokens"),
        ({}, "long", "allows 1 to 64 tokens"),
        ({"targets": ["nothing"]}, "ids", "match no projection"),
        ({}, ["some text"], "needs a tokenizer: pass NeuronALPruner"),
    ],
)
def test_bad_input_is_refused_before_work_and_changes_nothing(llama, ids, fields, dataset, message):
    data = {"ids": ids, "ids+1000": ids + 1000, "long": ids.repeat(1, 5)}.get(str(dataset), dataset)
    before = state(llama)
    with pytest.raises(ValueError, match=message):
        NeuronALPruner(config(**{"dataset": None, **fields})).prune(llama, data)
    assert all(torch.equal(value, before[key]) for key, value in llama.state_dict().items())
    assert not hasattr(llama.config, "sparsity_config")


def test_a_sparse_model_is_not_pruned_again_silently(llama, ids):
    NeuronALPruner(config(0.5, topup="uniform")).prune(llama, ids)
    with pytest.raises(ValueError, match="already sparse.* del model.config.sparsity_config"):
        NeuronALPruner(config()).prune(llama, ids)
    del llama.config.sparsity_config
    again = NeuronALPruner(config(topup="uniform"))
    again.prune(llama, ids)
    assert again.report.achieved_sparsity == pytest.approx(0.7, abs=1e-3)


def test_modes_and_gradients_are_left_alone(llama, ids):
    llama.to(torch.bfloat16).train()
    pruner = NeuronALPruner(config())
    pruner.prune(llama, ids)
    assert llama.training and pruner.report.achieved_sparsity == pytest.approx(0.7, abs=1e-3)
    weight = llama.model.layers[0].mlp.up_proj.weight
    assert weight.requires_grad and weight.grad is None and weight.dtype == torch.bfloat16
    llama(ids, labels=ids).loss.backward()
    assert weight.grad is not None


@pytest.mark.parametrize("dataset", ["a text " * 1000, "/unreadable/cal.txt"])
def test_whatever_the_config_calls_its_dataset_ids_are_pruned_with(llama, ids, dataset, monkeypatch):
    """Only the report tells the name; asking for a file of that name may raise."""
    is_file = pathlib.Path.is_file

    def refuse(self, **options):
        if self.is_relative_to("/unreadable"):
            raise PermissionError(13, "Permission denied", str(self))
        return is_file(self, **options)

    monkeypatch.setattr(pathlib.Path, "is_file", refuse)
    pruner = NeuronALPruner(config(topup="uniform", dataset=dataset))
    pruner.prune(llama, ids)
    assert pruner.report.config["dataset"] == ("cal.txt" if dataset.startswith("/") else dataset)


@pytest.mark.parametrize("what", ["make_report", "make_sparsity_config"])
def test_a_prune_that_fails_at_its_end_changes_nothing(llama, ids, what, monkeypatch):
    def fail(*_args):
        raise OSError("stop")

    monkeypatch.setattr(prune_module, what, fail)
    before, pruner = state(llama), NeuronALPruner(config(topup="uniform"))
    with pytest.raises(OSError, match="stop"):
        pruner.prune(llama, ids)
    assert all(torch.equal(value, before[key]) for key, value in llama.state_dict().items())
    assert pruner.report is None and not hasattr(llama.config, "sparsity_config")


@pytest.mark.parametrize("how", ["inference", "expanded"])
def test_weights_that_cannot_be_changed_are_refused_before_any_is(llama, ids, how):
    """They would fail one after the other at the very end, with the blocks before them pruned."""
    linear = llama.model.layers[1].mlp.up_proj
    with torch.inference_mode(how == "inference"):
        weight = torch.randn(1, 32).expand(48, 32) if how == "expanded" else torch.randn(48, 32)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    before = state(llama)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj cannot be changed in place"):
        NeuronALPruner(config(saliency="magnitude", topup="uniform")).prune(llama)
    assert all(torch.equal(value, before[key]) for key, value in llama.state_dict().items())


def test_ctrl_c_while_weights_change_waits_for_them(llama, ids, monkeypatch):
    original = prune_module.apply_changes

    def interrupted(decoder, masks):
        signal.raise_signal(signal.SIGINT)
        original(decoder, masks)

    monkeypatch.setattr(prune_module, "apply_changes", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    pruner = NeuronALPruner(config(topup="uniform"))
    with pytest.raises(KeyboardInterrupt):
        pruner.prune(llama, ids)
    assert signal.getsignal(signal.SIGINT) is handler
    assert pruner.report.achieved_sparsity == pytest.approx(0.7, abs=1e-3), "whole, not half"


def test_short_and_in_notebooks():
    pruner = NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform"))
    assert repr(pruner) == "NeuronALPruner(magnitude + uniform, 70.00%, nothing pruned yet)"
    assert pruner._repr_html_() == f"<p>{pruner!r}</p>"
    pruner.prune(make_model("llama"))
    assert repr(pruner) == "NeuronALPruner(magnitude + uniform, 70.00%, pruned: 69.96% zeros)"
    assert pruner._repr_html_() == f"<p>{pruner!r}</p>{pruner.report._repr_html_()}"
