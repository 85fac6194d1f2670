"""Every block of Python and `sh` in the documentation runs as it is written, on tiny models.

The names that a page uses without making them (`model`, `tokenizer`, `data`, ...) exist, and so do the directories and texts
that its commands read: `Qwen/Qwen3-0.6B` is a local directory, and Hub datasets are a made-up text.
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
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup import TOPUPS


pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the package is installed without its documentation")
LENGTH = 32  # tokens that the models admit
TEXT = " ".join(f"w{(i * i + 3 * i) % 60}" for i in range(600))
QUICK = {  # flags that make commands quick, beside those of the page
    "speed": ["--batches", "1", "--prompt-tokens", "8", "--new-tokens", "2", "--rounds", "1"],
    "evaluate": ["--max-windows", "2"],
    "compare": ["--max-windows", "2"],
}
FILES = (ROOT / "README.md", *PAGES)
RUN = [(path, number, block) for path in FILES for number, block in enumerate(blocks(path)) if not block.reason]
WITH_CODE = [path for path in FILES if any(where == path and b.language in ("python", "sh") for where, _, b in RUN)]


def tiny(family: str) -> transformers.PreTrainedModel:
    return make_model(family, vocab_size=256, max_position_embeddings=LENGTH, num_hidden_layers=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What pages read: a dense model, pruned ones, and texts."""
    folder = tmp_path_factory.mktemp("documentation")
    tokenizer = make_tokenizer()
    tiny("llama").save_pretrained(folder / "Qwen/Qwen3-0.6B")
    tokenizer.save_pretrained(folder / "Qwen/Qwen3-0.6B")
    pruner = NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform"), tokenizer)
    pruner.save(pruner.prune(tiny("llama")), folder / "qwen3-70")
    convert_checkpoint(folder / "qwen3-70", "packed", folder / "qwen3-70-packed")
    for name in ("my-text.txt", "my-test.txt"):
        (folder / name).write_text(TEXT)
    return folder


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    """Configs ask for few sequences, and for the search only where a page names it."""
    check = NeuronALConfig.__post_init__

    def little(config):
        config.num_samples = min(config.num_samples, 8)
        config.num_alignment_samples = min(config.num_alignment_samples or 2, 2)
        if config.topup == "search" and config.pattern is None:
            config.topup, config.topup_args = "uniform", {}
        if config.bits_per_weight is not None:  # scales and padding take more bits in a narrow model
            config.bits_per_weight = max(config.bits_per_weight, 8)
        check(config)

    monkeypatch.setattr(NeuronALConfig, "__post_init__", little)
    for registry in (SALIENCIES, TOPUPS):
        registry.names()
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    made = datasets.Dataset.from_dict({name: [TEXT] for name in ("text", "sentence")})
    load = datasets.load_dataset
    local = ("text", "csv", "json", "parquet")
    monkeypatch.setattr(datasets, "load_dataset", lambda path, *a, **k: load(path, *a, **k) if path in local else made)
    monkeypatch.setattr(huggingface_hub.HfApi, "auth_check", lambda *_, **__: None)
    for owner in (NeuronALPruner, transformers.PreTrainedModel):
        signature = inspect.signature(owner.push_to_hub)
        monkeypatch.setattr(
            owner, "push_to_hub", lambda *args, s=signature, **kwargs: s.bind(*args, **kwargs) and None
        )


@pytest.fixture
def names():
    """What pages use without making it."""
    tokenizer = make_tokenizer()
    pruner = NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform"), tokenizer)
    model = pruner.prune(tiny("llama"))
    ids = torch.tensor(tokenizer(TEXT, verbose=False)["input_ids"])[: 8 * LENGTH].view(8, LENGTH)
    quiet = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return {
        "__name__": "page",
        "dense": tiny("llama"),
        "model": model,
        "moe": tiny("mixtral"),
        "pruner": pruner,
        "tokenizer": tokenizer,
        "data": [{"input_ids": sequence, "labels": sequence} for sequence in ids],
        "loader": [{"input_ids": batch, "labels": batch} for batch in ids.split(4)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "Trainer": transformers.Trainer,
        "arguments": transformers.TrainingArguments("trained", max_steps=3, **quiet),
    }


@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_blocks_run(path, files, names, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    shutil.copytree(files, folder)
    monkeypatch.chdir(folder)
    for where, number, block in RUN:
        if where == path and block.language == "python":
            exec(compile(block.code, f"{path.name}, block {number}", "exec"), names)
        elif where == path and block.language == "sh":
            for words in commands(block.code):
                assert words[:2] == ["optimum-cli", "neuronal"], words
                monkeypatch.setattr(sys, "argv", [*words, *QUICK.get(words[2], [])])
                optimum_cli.main()
