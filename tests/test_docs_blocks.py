"""The documentation's code: every block of Python and `sh` runs as it is written, on something tiny.

The names that a page uses without making them (`model`, `tokenizer`, `data`, ...) are there, and so are the directories and texts that
its commands read: `Qwen/Qwen3-0.6B` is a local directory, Hub datasets are a made-up text.
"""

import inspect
import shutil
import sys

import datasets
import huggingface_hub
import pytest
import torch
import transformers
from conftest import make_model, make_tokenizer
from markdown_files import DOCS, PAGES, ROOT, blocks, commands, name_of

from optimum.commands import optimum_cli
from optimum_neuronal import NeuronALConfig, NeuronALPruner, convert_checkpoint
from optimum_neuronal.config.config_fields import EFFORTS
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup import TOPUPS


pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the package is installed without its documentation")
RUN = ("python", "sh")
LENGTH = 32  # tokens that the models admit
TEXT = " ".join(f"w{(i * i + 3 * i) % 60}" for i in range(600))
LITTLE = {  # what commands are given beside what the page says, so that they are quick
    "speed": ["--batches", "1", "--prompt-tokens", "8", "--new-tokens", "2", "--rounds", "1", "--no-torchao"],
    "evaluate": ["--max-windows", "2"],
    "compare": ["--max-windows", "2"],
}
WITH_CODE = [
    path
    for path in (ROOT / "README.md", *PAGES)
    if any(block.language in RUN and not block.reason for block in blocks(path))
]


def tiny(family: str) -> transformers.PreTrainedModel:
    return make_model(family, vocab_size=256, max_position_embeddings=LENGTH, num_hidden_layers=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What pages read: a dense model, a pruned one, and texts."""
    folder = tmp_path_factory.mktemp("documentation")
    tokenizer = make_tokenizer()
    for name, family in (("Qwen/Qwen3-0.6B", "llama"), ("mixture", "mixtral")):
        tiny(family).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    pruner = NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform"), tokenizer)
    pruner.save(pruner.prune(tiny("llama")), folder / "qwen3-70")
    convert_checkpoint(folder / "qwen3-70", "packed", folder / "qwen3-70-packed")
    for name in ("my-text.txt", "my-test.txt"):
        (folder / name).write_text(TEXT)
    return folder


@pytest.fixture
def cheap(monkeypatch):
    """Configs ask for little, and leave the search out where no page names it."""
    for effort in EFFORTS.values():
        monkeypatch.setitem(effort, "topup", "uniform")
        monkeypatch.setitem(effort, "refit_epochs", 0)
    check = NeuronALConfig.__post_init__

    def little(config):
        config.num_samples = min(config.num_samples, 8)
        config.num_alignment_samples = min(config.num_alignment_samples or 2, 2)
        if config.bits_per_weight is not None:  # scales and padding take more bits in a narrow model
            config.bits_per_weight = max(config.bits_per_weight, 8)
        check(config)

    monkeypatch.setattr(NeuronALConfig, "__post_init__", little)
    for registry in (SALIENCIES, TOPUPS):
        registry.names()
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))


@pytest.fixture
def no_hub(monkeypatch):
    def load_dataset(*_, **__):
        return datasets.Dataset.from_dict({name: [TEXT] for name in ("text", "sentence")})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    signature = inspect.signature(NeuronALPruner.push_to_hub)
    monkeypatch.setattr(NeuronALPruner, "push_to_hub", lambda *args, **kwargs: signature.bind(*args, **kwargs))


@pytest.fixture
def names(files):
    """What pages use without making it."""
    tokenizer = make_tokenizer()
    dense = tiny("llama")
    pruner = NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform"), tokenizer)
    ids = torch.tensor(tokenizer(TEXT, verbose=False)["input_ids"])[: 8 * LENGTH].view(8, LENGTH)
    loader = [{"input_ids": batch, "labels": batch} for batch in ids.split(4)]
    model = pruner.prune(tiny("llama"))
    return {
        "__name__": "page",
        "dense": dense,
        "model": model,
        "mixture": tiny("mixtral"),
        "pruner": pruner,
        "tokenizer": tokenizer,
        "data": [{"input_ids": sequence, "labels": sequence} for sequence in ids],
        "loader": loader,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "Trainer": transformers.Trainer,
        "arguments": transformers.TrainingArguments(
            "trained", max_steps=3, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True
        ),
    }


@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_blocks_run(path, files, cheap, no_hub, names, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    shutil.copytree(files, folder)
    monkeypatch.chdir(folder)
    for number, block in enumerate(blocks(path)):
        if block.reason or block.language not in RUN:
            continue
        if block.language == "python":
            exec(compile(block.code, f"{path.name}, block {number}", "exec"), names)
            continue
        for words in commands(block.code):
            assert words[0] == "optimum-cli"
            monkeypatch.setattr(sys, "argv", [*words, *LITTLE.get(words[2], [])])
            optimum_cli.main()
