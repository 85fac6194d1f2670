"""Every block of Python, YAML and `sh` in the documentation runs as it is written, on tiny models.

The names that a page uses without making them (`model`, `tokenizer`, `data`, ...) exist, and so do the directories and texts
that its commands read: `Qwen/Qwen3-0.6B` is a local directory, and Hub datasets are a made-up text.
"""

import argparse
import json
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
import transformers
from conftest import make_model, make_tokenizer
from markdown_files import BLOCK, DOCS, PAGES, ROOT, blocks, commands, name_of

from optimum.commands import optimum_cli
from optimum_neuronal import FinetuneConfig, NeuronALConfig, NeuronALPruner, convert_checkpoint
from optimum_neuronal.data.known_datasets import KnownDataset
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup import TOPUPS


pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the package is installed without its documentation")
TEXT = " ".join(f"w{(i * i + 3 * i) % 60}" for i in range(600))
QUESTIONS = {
    "boolq.jsonl": {"question": "w1", "passage": "w2 w3", "label": 1},
    "arc_easy.jsonl": {"question": "w1", "choices": {"text": ["w2", "w3"], "label": ["A", "B"]}, "answerKey": "B"},
}
PROGRAMS = ("optimum-cli", "benchmarks.", "examples/")
QUICK = {  # flags that make commands quick, beside those of the page
    "speed": "--batches 1 --prompt-tokens 8 --new-tokens 2 --rounds 1",
    "compare": "--max-windows 2",
    "sample": "--num-samples 32 --max-new-tokens 16",
}


def tiny(family: str) -> transformers.PreTrainedModel:
    return make_model(family, vocab_size=256, max_position_embeddings=32, num_hidden_layers=2)


def magnitude_pruned() -> tuple[NeuronALPruner, transformers.PreTrainedModel]:
    pruner = NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform"), make_tokenizer())
    pruner.tokenizer.eos_token = "<unk>"  # lm-eval needs one
    return pruner, pruner.prune(tiny("llama"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documentation")
    tiny("llama").save_pretrained(folder / "Qwen/Qwen3-0.6B")
    make_tokenizer().save_pretrained(folder / "Qwen/Qwen3-0.6B")
    pruner, model = magnitude_pruned()
    pruner.save(model, folder / "qwen3-70")
    convert_checkpoint(folder / "qwen3-70", "packed", folder / "qwen3-70-packed")
    for name in ("my-text.txt", "my-test.txt"):
        (folder / name).write_text(TEXT)
    for name, question in QUESTIONS.items():
        (folder / name).write_text(json.dumps(question))
    return folder


@pytest.fixture
def cheap(monkeypatch):
    """Few sequences and steps, no search, no Hub; methods that a page registers are forgotten afterwards."""
    check, load = NeuronALConfig.__post_init__, datasets.load_dataset

    def little(config):
        config.num_samples, config.num_alignment_samples = min(config.num_samples, 8), 2
        config.refit_epochs = 0
        if config.topup == "search":
            config.topup, config.topup_args = "uniform", {}
        check(config)

    def load_dataset(path, *args, **kwargs):
        if kwargs.get("data_files") not in (None, "hub.json"):
            return load(path, *args, **kwargs)
        made = datasets.Dataset.from_dict({"text": [TEXT], "sentence": [TEXT]})
        return made.to_iterable_dataset() if kwargs.get("streaming") else made

    monkeypatch.setattr(NeuronALConfig, "__post_init__", little)
    # Accelerate allows one precision in a process.
    small = {"kl_weight": 0.1}  # a random teacher teaches nothing about the text
    small |= {"steps": 8, "tokens": None, "minutes": None, "seq_length": 16, "learning_rate": 0.03, "bf16": False}
    monkeypatch.setattr(FinetuneConfig, "__post_init__", lambda config: vars(config).update(small))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(KnownDataset, "download", lambda *_: "hub.json")
    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", lambda *_, **__: None)
    for owner in (NeuronALPruner, transformers.PreTrainedModel):
        monkeypatch.setattr(owner, "push_to_hub", lambda *_, **__: None)
    for registry in (SALIENCIES, TOPUPS):
        registry.names()
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))


def names() -> dict:
    """What pages use without making it."""
    pruner, model = magnitude_pruned()
    ids = torch.tensor(pruner.tokenizer(TEXT, verbose=False)["input_ids"])[: 8 * 32].view(8, 32)
    quiet = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return {
        **{"__name__": "page", "pruner": pruner, "model": model, "tokenizer": pruner.tokenizer},
        **{"dense": tiny("llama"), "moe": tiny("mixtral"), "Trainer": transformers.Trainer},
        "data": [{"input_ids": sequence, "labels": sequence} for sequence in ids],
        "loader": [{"input_ids": batch, "labels": batch} for batch in ids.split(4)],
        "arguments": transformers.TrainingArguments("trained", max_steps=3, **quiet),
    }


@pytest.mark.parametrize("path", (ROOT / "README.md", *PAGES), ids=name_of)
def test_blocks_run(path, files, cheap, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    namespace = names()
    for number, block in enumerate(blocks(path)):
        if block.language == "python" and not block.reason:
            exec(compile(block.code, f"{path.name}, block {number}", "exec"), namespace)
        elif block.language == "yaml" and block.code.startswith("# "):  # a file, whose name is its first line
            file = Path(block.code.splitlines()[0].removeprefix("# "))
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.code)
        elif block.language == "sh" and not block.reason:
            for words in commands(block.code):
                assert words[:2] == ["optimum-cli", "neuronal"], words
                monkeypatch.setattr(sys, "argv", [*words, *QUICK.get(words[2], "").split()])
                optimum_cli.main()


class Parsed(Exception):
    """A command got as far as its arguments."""


def long_commands(path: Path) -> Iterator[list[str]]:
    """Yield the words of the commands of a page that take too long to run, in blocks and in sentences."""
    text = path.read_text(encoding="utf-8")
    code = [block.code for block in blocks(path) if block.language == "sh" and block.reason]
    code += [" ".join(f.split()) for f in re.findall(r"`([^`]*python -m benchmarks[^`]+)`", BLOCK.sub("", text))]
    variables = {}
    for words in commands("\n".join(code)):
        name, _, value = words[0].partition("=")
        if len(words) == 1 and value:
            variables[f"${name}"] = value.split()
        else:
            yield [part for word in words for part in variables.get(word, [word])]


@pytest.mark.parametrize("path", (ROOT / "README.md", *PAGES), ids=name_of)
def test_long_commands_have_arguments_that_exist(path, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, *args, **kwargs):
        parse(parser, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.chdir(ROOT)
    for words in long_commands(path):
        program = next((place for place, word in enumerate(words) if word.startswith(PROGRAMS)), None)
        if program is None:
            continue  # another package's command
        monkeypatch.setattr(sys, "argv", words[program:])
        with pytest.raises(Parsed):
            if words[program] == "optimum-cli":
                optimum_cli.main()
            else:
                runpy.run_path(f"{words[program].removesuffix('.py').replace('.', '/')}.py", run_name="__main__")
