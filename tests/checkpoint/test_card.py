import ast
import re
import shlex
from dataclasses import replace

import pytest
import torch
from conftest import make_model, make_tokenizer
from huggingface_hub import ModelCard
from sparse_checkpoints import same, save_pruned
from transformers import AutoModelForCausalLM

from optimum_neuronal import FinetuneConfig, NeuronALConfig, NeuronALPruner
from optimum_neuronal.checkpoint import card as cards
from optimum_neuronal.checkpoint.card import make_card, write_card
from optimum_neuronal.checkpoint.writing import SaveOptions
from optimum_neuronal.cli.neuronal_command import main


DENSE = SaveOptions("dense")


def python(card):
    """The block of code on a card."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    return code


def commands(card):
    """The words of the commands that make the model again."""
    return [shlex.split(line) for line in re.findall(r"^optimum-cli neuronal (?:prune|finetune) .*$", card, re.M)]


@pytest.fixture
def pruned(tmp_path):
    return save_pruned(tmp_path / "llama-70", ignore=[r"layers\.0\..*q_proj"])


@pytest.mark.parametrize(
    ("given", "said", "papers"),
    [
        ({"topup": "neuronal"}, "alps + neuronal, sequence, block step.\n\nALPS chose the weights, and gave those that are left new values. NeuronAL decided where the sparsity goes, in this package's variant of the paper's method.", ["Cunegatti", "Meng"]),
        ({"saliency": "wanda", "topup_args": {"variant": "authors"}}, "wanda + neuronal, authors, block and row steps.\n\nWanda chose the weights, by their magnitude and that of their inputs. NeuronAL decided where the sparsity goes, as in the code behind its paper's tables.", ["Cunegatti", "Sun"]),
        ({"saliency": "sparsegpt", "topup_args": {"variant": "authors"}}, "sparsegpt + neuronal, authors, block step. No row step: 'sparsegpt' updates all rows of a weight together.", ["Cunegatti", "Frantar"]),
    ],
)  # fmt: skip
def test_it_says_which_method_ran_and_cites_it(given, said, papers, ids):
    config = NeuronALConfig(0.5, num_samples=8, num_alignment_samples=2, **given)
    pruner, model = NeuronALPruner(config), make_model("llama")
    pruner.prune(model, ids[:8])
    card = make_card(model, pruner.report, "me/llama-50", DENSE)
    assert f"without retraining by `optimum_neuronal`: {said}" in card
    cited = card.partition("## Cite")[2]
    assert [line.split()[1] for line in cited.splitlines() if line.startswith("- ")] == papers
    assert model.config.sparsity_config["method"] == pruner.report.method == config.methods.title


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_the_example_generates(template, tmp_path, capsys, monkeypatch):
    """A chat if the model chats; of what is converted too."""
    monkeypatch.chdir(tmp_path)
    save_pruned(tmp_path / "llama-70", tokenizer=make_tokenizer(chat_template=template), overrides={"vocab_size": 256})
    main(["convert", "llama-70", "--format", "packed", "--output", "packed"])
    for folder in ("llama-70", "packed"):
        code = python((tmp_path / folder / "README.md").read_text())
        assert ("import optimum_neuronal" in code) == (folder == "packed")
        assert ("apply_chat_template(messages, add_generation_prompt=True" in code) == bool(template)
        assert ("Once upon" in code) == (template is None)
        capsys.readouterr()
        exec(code.replace("50", "2").replace("path/to/", ""), {})
        assert capsys.readouterr().out.strip()


def test_the_card_of_a_multimodal_model_speaks_of_its_text_decoder(ids):
    pruner, model = NeuronALPruner(NeuronALConfig(0.5, "magnitude", topup="uniform")), make_model("gemma3")
    pruner.prune(model)
    card = make_card(model, pruner.report, "me/gemma", DENSE)
    assert "of the weights of the linear projections of this model's text decoder are zero" in card


def test_what_it_says(pruned, monkeypatch):
    pruner, model = pruned
    monkeypatch.setattr(cards, "_inherited", lambda base: {"license": "llama3"})
    model.config.sparsity_config["base_model"] = "me/dense"
    pruner.report.evaluation["wikitext2"] = {"dense": 12.3456, "pruned": 23.4567}
    text = make_card(model, pruner.report, "me/llama-70", DENSE)
    data = ModelCard(text).data
    assert data.base_model == "me/dense" and "base_model_relation" not in text and data.license == "llama3"
    assert data.tags == ["sparse", "pruned", "optimum_neuronal"] and data.pipeline_tag == "text-generation"
    body = re.sub(" +", " ", text)
    assert "70.0% of the weights" in body
    assert "`optimum_neuronal`: magnitude + uniform.\n\nEvery projection has" in body
    assert "| perplexity, wikitext2 | 12.35 (dense), 23.46 (pruned) |" in body
    assert "| `model.layers.0` to `model.layers.2` | 69.96% |" in body and "[me/dense](https://huggingface.co/" in body
    assert "## Cite" not in text, "magnitude and uniform have no paper"


def test_the_command_makes_the_same_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model("llama", vocab_size=256).to(torch.bfloat16).save_pretrained("dense")
    make_tokenizer().save_pretrained("dense")
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 w6 w7 w8 " * 80)
    sizes = {"num_samples": 8, "seq_length": 8}
    config = NeuronALConfig(0.6, saliency="wanda", topup="uniform", seed=3, dataset="text.txt", **sizes)
    pruner = NeuronALPruner.from_pretrained("dense", config=config, dtype=torch.float32)
    pruner.quantize("pruned", format="packed", save_dtype=torch.float16)
    (words,) = commands((tmp_path / "pruned" / "README.md").read_text())
    places = {"path/to/the-dense-model": "dense", "config.json": "pruned/config.json", "path/to/text.txt": "text.txt"}
    words = [places.get(word, word) for word in words]
    words[words.index("--output") + 1] = "again"
    main(words[2:])
    first, again = (AutoModelForCausalLM.from_pretrained(name).state_dict() for name in ("pruned", "again"))
    assert same(first, again) and "model.layers.0.mlp.up_proj.packed_values" in again


@pytest.mark.parametrize("title", ["x'; rm -rf ~; $(touch a) `touch b` \"+__import__('os')+\"", "a\nb", "a b"])
def test_a_title_is_quoted_for_python_and_for_the_shell(pruned, title):
    pruner, model = pruned
    card = make_card(model, pruner.report, title, SaveOptions("packed"))
    shown = title.replace("\n", "\\n")
    assert f"# {shown}\n" in card and commands(card)[0][-1] == shown
    (name,) = re.findall(r"^model = AutoModelForCausalLM.from_pretrained\((.*)\)$", card, re.M)
    assert ast.literal_eval(name) == f"path/to/{shown}"


def test_a_damaged_report_is_no_card(pruned, tmp_path, caplog):
    pruner, model = pruned
    write_card(tmp_path, model, replace(pruner.report, config={}), "llama", DENSE)
    assert "neuronal_report.json is damaged (KeyError('topup')), so there is no model card" in caplog.text
    assert not (tmp_path / "README.md").exists()


def test_commands_of_a_model_that_was_tuned_twice_are_a_chain(pruned):
    """Files, and directories that this machine knows alone, are for the reader to fill in."""
    pruner, model = pruned
    config = FinetuneConfig(steps=3, dataset=("c4", "chat.jsonl")).to_dict()
    run = {"config": config, "teacher": "dense", "steps": 3, "evaluation": {}, "answers": {}}
    run |= {"held_out": {"before": 9, "after": 8}}
    run |= {"source": "c4", "tokens": 9, "learning_rate": 1, "seconds": 1, "resumed": False}
    report = replace(pruner.report, training=[run, {**run, "teacher": "me/dense"}])
    for title, place in (("me/llama-70", "me/llama-70"), ("llama-70", "path/to/llama-70")):
        card = make_card(model, report, title, SaveOptions("packed"))
        words = [dict(zip(command, command[1:])) for command in commands(card)]
        assert [one["--output"] for one in words] == ["llama-70-step-1", "llama-70-step-2", "llama-70"]
        assert [one["--model"] for one in words[1:]] == ["llama-70-step-1", "llama-70-step-2"]
        assert [one["--teacher"] for one in words[1:]] == ["path/to/dense", "me/dense"]
        assert all(one["--format"] == "packed" for one in words) and words[1]["--seed"] == "0"
        assert " --dataset c4 path/to/chat.jsonl " in card
        assert f'from_pretrained("{place}")' in card and f"neuronal convert {place} --format dense" in card
