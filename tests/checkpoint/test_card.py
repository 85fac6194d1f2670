import ast
import math
import re
import shlex
import sys
import time
from dataclasses import replace

import pytest
import torch
from conftest import make_model, make_tokenizer
from huggingface_hub import ModelCard
from optimum.commands.optimum_cli import main
from sparse_checkpoints import save_pruned
from transformers import AutoModelForCausalLM

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.checkpoint import card as cards
from optimum_neuronal.checkpoint.card import with_format
from optimum_neuronal.common.display import format_bytes
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.packed.sparsify import sparsify
from optimum_neuronal.pruning.reporting import pruned_size


def make_card(model, report, *args):
    decoder = find_decoder(model, report.config["targets"], report.config["ignore"])
    return cards.make_card(model, report, pruned_size(decoder, report), *args)


def python(card):
    """The blocks of code on a card."""
    return re.findall(r"```python\n(.*?)```", str(card), re.S)


def command(card):
    """The words of the command that makes the model again."""
    (line,) = re.findall(r"^optimum-cli neuronal prune .*$", str(card), re.M)
    return shlex.split(line)


@pytest.fixture
def pruned(tmp_path):
    return save_pruned(tmp_path / "llama-70", ignore=[r"layers\.0\..*q_proj"])


def test_the_code_on_the_card_is_the_config(pruned):
    """It is run, but for the model and the prune."""
    pruner, model = pruned
    code = python(make_card(model, pruner.report, "me/llama-70"))[-1]
    made = {}
    exec(code.partition("pruner = ")[0].partition("model = ")[0] + "config = " + code[code.index("NeuronALConfig(\n") :]
         .partition("\n)\n")[0], made)  # fmt: skip
    assert made["config"] == NeuronALConfig.from_dict(pruner.report.config)
    assert "num_samples" not in code, "no calibration data were needed"


def test_metadata(pruned, tmp_path):
    pruner, model = pruned
    data = make_card(model, pruner.report, "me/llama-70").data
    assert data.base_model is None and "base_model_relation" not in data.to_dict(), "made from a config"
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    assert data.tags == ["sparse", "pruned", "optimum_neuronal"] and data.license is None and data.eval_results is None
    for origin, told in (("meta/llama", "meta/llama"), (str(tmp_path), None), ("a/b/c", None)):
        model.config._name_or_path = origin
        card = make_card(model, pruner.report, "me/llama-70")
        assert card.data.base_model == told and ("huggingface.co" in str(card)) == (told is not None)
        assert str(tmp_path) not in str(card), "no folder of this machine is published"
        assert card.data.to_dict().get("base_model_relation") == ("quantized" if told else None)
        assert ModelCard(str(card)).data.to_dict() == card.data.to_dict(), "it is valid YAML"


def test_how_to_load_it_depends_on_the_format(pruned):
    pruner, model = pruned
    dense, packed = (str(make_card(model, pruner.report, "me/llama-70", format)) for format in ("dense", "packed"))
    assert "import optimum_neuronal\nfrom transformers" in packed and "import optimum_neuronal\n" not in dense
    assert "optimum-cli neuronal convert llama-70 --format dense --output llama-70-dense" in packed
    assert with_format(dense, "packed", {}) == packed and with_format(packed, "dense", {}) == dense
    assert with_format(dense, "dense", {}) == dense and with_format("# Mine\n", "packed", {}) == "# Mine\n"
    told = "not zero, and where they belong; token embeddings and head have 8 bits. `import"
    assert told in with_format(packed, "packed", {"embedding_bits": 8})


def test_perplexities_are_told_if_they_were_measured(pruned):
    pruner, model = pruned
    assert "Perplexity" not in str(make_card(model, pruner.report, "llama-70"))
    pruner.report.evaluation = {"wikitext2": {"dense": 12.3456, "pruned": 23.456}, "mine": {"pruned": 7}}
    card = re.sub(" +", " ", str(make_card(model, pruner.report, "llama-70")))
    assert "| wikitext2 | 12.35 | 23.46 |\n| mine | - | 7.00 |" in card
    assert "perplexity, wikitext2" in str(pruner.report)


def test_measured_figures_are_metadata(pruned):
    """A model-index as huggingface_hub makes it; a dataset of the Hub by its id, what is infinite left out."""
    pruner, model = pruned
    found = {"wikitext2": 23.45678, "text.txt": 7, "me/data:test:text": 8.0, "ptb": math.inf}
    pruner.report.evaluation = {name: {"dense": 5.0, "pruned": value} for name, value in found.items()}
    card = ModelCard(str(make_card(model, pruner.report, "me/llama-70")))
    told = [(entry.dataset_type, entry.dataset_name, entry.metric_value) for entry in card.data.eval_results]
    assert told == [
        ("Salesforce/wikitext", "wikitext2", 23.4568),
        ("custom", "text.txt", 7.0),
        ("me/data", "me/data:test:text", 8.0),
    ]
    assert {entry.metric_type for entry in card.data.eval_results} == {"perplexity"}
    (index,) = card.data.to_dict()["model-index"]
    assert index["name"] == "me/llama-70" and index["results"][0]["dataset"]["config"] == "wikitext-2-raw-v1"


def test_the_example_generates(tmp_path, capsys, monkeypatch):
    """It is run as it stands, in the folder above the model's."""
    pruner, model = save_pruned(tmp_path / "llama-70", tokenizer=make_tokenizer(), overrides={"vocab_size": 256})
    monkeypatch.chdir(tmp_path)
    exec(python((tmp_path / "llama-70" / "README.md").read_text())[0], {})
    assert re.search(r"w\d", capsys.readouterr().out)


def test_without_its_own_tokenizer_the_dense_models_is_named(pruned, tmp_path):
    pruner, model = pruned
    assert 'AutoTokenizer.from_pretrained("path/to/the-dense-model")' in (tmp_path / "llama-70/README.md").read_text()
    model.config._name_or_path = "meta/llama"
    dense, packed = (str(make_card(model, pruner.report, "x", format, False)) for format in ("dense", "packed"))
    assert 'tokenizer = AutoTokenizer.from_pretrained("meta/llama")' in packed
    assert with_format(dense, "packed", {}) == packed and with_format(packed, "dense", {}) == dense


def test_a_model_that_generates_nothing_has_no_example(pruned, monkeypatch):
    pruner, model = pruned
    monkeypatch.setattr(type(model), "can_generate", lambda self: False)
    assert "okenizer" not in python(make_card(model, pruner.report, "x"))[0]


def test_the_command_makes_the_same_model(tmp_path, monkeypatch):
    """It is run, with what the card says is to be filled in."""
    make_model("llama", vocab_size=256).save_pretrained(tmp_path / "dense")
    make_tokenizer().save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 w6 w7 w8 " * 80)
    config = NeuronALConfig(0.6, saliency="wanda", topup="uniform", num_samples=8, seq_length=8, seed=3)
    pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=replace(config, dataset=f"{tmp_path}/text.txt"))
    model = pruner.quantize(tmp_path / "first")
    card = (tmp_path / "first" / "README.md").read_text()
    words = command(card)
    places = {"path/to/the-dense-model": "../dense", "path/to/text.txt": "../text.txt", "first": "../again"}
    assert words[:3] == ["optimum-cli", "neuronal", "prune"] and set(places) < set(words)
    assert "Fill in: `path/to/the-dense-model` is where you have the dense model; `path/to/text.txt` is" in card
    monkeypatch.chdir(tmp_path / "first")
    monkeypatch.setattr(sys, "argv", [places.get(word, word) for word in words])
    main()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_what_is_to_be_filled_in(pruned):
    pruner, model = pruned
    model.config._name_or_path, report = "meta/llama", pruner.report
    assert command(make_card(model, report, "me/x"))[3:] == [
        *["--model", "meta/llama", "--config", "neuronal_report.json", "--output", "x"]
    ]
    assert "Fill in" not in str(make_card(model, report, "me/x")), "no calibration data were needed"
    for dataset, source, text in (
        ("c4", "c4 (allenai/c4, split train), column text", None),
        ("me/data:train:text", "me/data:train:text (me/data, split train), column text", None),
        ("c4", "a list of 8 strings", "path/to/text.txt"),
        (None, "token ids of shape (8, 8)", "path/to/text.txt"),
        ("own.jsonl:prose", "own.jsonl, column prose", "path/to/own.jsonl"),
    ):
        report.calibration = {"source": source, "num_samples": 8, "seq_length": 8, "seed": 0}
        report.config["dataset"] = dataset
        card = make_card(model, report, "me/x")
        assert ("Fill in" in str(card)) == ("--dataset" in command(card)) == (text is not None)
        assert text is None or text in command(card)
        assert f"dataset={(text or dataset)!r}" in python(card)[-1]


def test_it_tells_the_memory_of_packed_weights(pruned):
    pruner, model = pruned
    card = str(make_card(model, pruner.report, "llama-70"))
    found = re.search(r"take\n(.*) of memory instead of (.*), the whole model (.*) instead of (.*)\.\n", card).groups()
    dense = model.get_memory_footprint()
    sparsify(model)
    packed = model.get_memory_footprint()
    summary = model.packing
    told = (summary.packed_bytes, summary.dense_bytes, packed, dense)
    assert found == tuple(format_bytes(size) for size in told)


@pytest.mark.parametrize("title", ["my model", "it's; rm -rf ~ $(x) {0}", 'a"b', "Modèle"])
def test_a_title_is_quoted_for_python_and_for_the_shell(pruned, title):
    pruner, model = pruned
    dense, packed = (str(make_card(model, pruner.report, title, format)) for format in ("dense", "packed"))
    (line,) = re.findall(r"^optimum-cli neuronal convert .*$", packed, re.M)
    assert shlex.split(line)[3:] == [title, "--format", "dense", "--output", f"{title}-dense"]
    assert command(packed)[-1] == title
    (code,) = re.findall(r"^model = AutoModelForCausalLM.from_pretrained\((.*)\)$", packed, re.M)[:1]
    assert ast.literal_eval(code) == title
    assert with_format(dense, "packed", {}) == packed and with_format(packed, "dense", {}) == dense


def test_a_title_is_one_line_of_text(pruned):
    pruner, model = pruned
    card = str(make_card(model, pruner.report, "a\n\x1b[2J\udcff"))
    assert r"# a\n\x1b[2J\udcff" in card and card.encode("utf-8")


def test_a_long_card_of_another_make_takes_no_time():
    card = "# Mine\n" + "\n## Use\n\n" * 200_000
    start = time.perf_counter()
    assert with_format(card, "packed", {}) == card
    assert time.perf_counter() - start < 1
