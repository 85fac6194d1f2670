"""Each check runs once, before a model is loaded."""

import sys
from collections import Counter
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from optimum_neuronal import pruner
from optimum_neuronal.cli import finetune_command, flags, measuring_commands, prune_command
from optimum_neuronal.model import sources
from optimum_neuronal.pruning import prepare


PRUNE = ("prune", "--sparsity", "0.7", "--output", "new", "--model", "dense")
COMMANDS = (
    (("prune", "--model", "dense", "--output", "new"), "The config has no sparsity"),
    (("prune", "--model", "dense", "--sparsity", "0.7"), "--output is missing"),
    ((*PRUNE, "--dry-run", "--batch-size", "0"), "batch_size is 0: expected a whole number of at least 1"),
    ((*PRUNE, "--max-hidden-bytes", "-1"), "max_hidden_bytes is -1: expected a whole number of at least 0"),
    ((*PRUNE, "--config", "gone.json"), "No such file or directory: 'gone.json'"),
    ((*PRUNE, "--dataset", "gone.txt"), "'gone.txt' does not exist"),
    ((*PRUNE, "--dataset", "wikitext-2"), "Did you mean 'wikitext2'"),
    ((*PRUNE, "--evaluate", "c4", "gone.jsonl:code"), "'gone.jsonl' does not exist"),
    ((*PRUNE, "--evaluate", "notes.xyz"), "'notes.xyz' does not exist, or is not a single file that"),
    ((*PRUNE, "--device", "tpu"), "tpu"),
    ((*PRUNE, "--import", "no_such_module"), "No module named 'no_such_module'"),
    ((*PRUNE, "--output", "dense"), "dense holds dense, which is read: choose a new directory"),
    ((*PRUNE, "--output", "dense", "--overwrite", "--dry-run"), "dense holds .*dense, which is read"),
    ((*PRUNE, "--output", "project", "--overwrite"), "project holds 1 file, and is not a model's directory"),
    ((*PRUNE, "--output", "notes.xyz"), "notes.xyz is a file"),
    ((*PRUNE, "--work-dir", "new/work"), "must not lie in each other"),
    ((*PRUNE, "--work-dir", "dense"), "dense holds other files"),
    ((*PRUNE[:-1], "./dens"), "./dens does not exist: name the directory of a model"),
    ((*PRUNE[:-1], "empty"), "There is no config.json in empty: name a model's directory"),
    ((*PRUNE[:-1], "adapter"), "There is no config.json in adapter: name a model's directory"),
    (("evaluate", "--model", "dense", "--batch-size", "0"), "batch_size is 0"),
    (("evaluate", "--model", "dense", "--dataset", "gone.txt"), "'gone.txt' does not exist"),
    (("evaluate", "--model", "dense", "--limit", "0"), "limit is 0"),
    (("evaluate", "--model", "dense", "--limit", "5"), "limit is 5, but there are no tasks"),
    (("compare", "--model", "dense", "--batch-size", "0"), "batch_size is 0"),
    (("sample", "--model", "dense", "--output", "own.txt"), "expected a file whose name ends in .jsonl"),
    (("sample", "--model", "dense", "--output", "own.jsonl", "--temperature", "0"), "temperature is 0"),
    (("inspect", "./gone"), "is neither a directory nor the id of a model on the Hub"),
)


@pytest.mark.parametrize(("words", "message"), COMMANDS)
def test_mistakes_are_found_before_a_model_is_loaded(run, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (flags, measuring_commands, pruner):
        monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    files = ("dense/config.json", "adapter/adapter_config.json", "project/README.md")
    for file in files:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.xyz").write_text("text of an unknown kind")
    with pytest.raises(SystemExit, match=message):
        run(*words)
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == len(files) + 1, "nothing was written"


@pytest.mark.parametrize("module", [prune_command, finetune_command])
def test_the_device_is_chosen_by_the_process_group(run, module, dense, monkeypatch):
    """Before it, every process would take the first accelerator."""
    joined, more = [], ("--sparsity", 0.5, "--topup", "uniform") if module is prune_command else ("--teacher", dense)
    monkeypatch.setattr(module, "process_group", lambda: nullcontext(joined.append(1)))
    monkeypatch.setattr(flags, "device_of", Mock(side_effect=lambda _: sys.exit("in" if joined else "outside")))
    with pytest.raises(SystemExit, match="^in$"):
        run(module.__name__.rpartition(".")[2][:-8], "--model", dense, "--output", dense.with_name("new"), *more)


def test_a_prune_checks_everything_once(run, dense, tmp_path, monkeypatch):
    calls = Counter()

    def count(module, name):
        check = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.update([name]) or check(*args, **kwargs))

    for module, name in (
        (flags, "check_texts"),
        (pruner, "check_output"),
        (pruner, "check_saveable"),
        (prune_command, "check_output"),
        (prune_command, "check_unquantized"),
        (sources, "check_directory"),
        (prepare, "check_prune"),
    ):
        count(module, name)
    text = tmp_path / "text.txt"
    few = ("--num-samples", 8, "--num-alignment-samples", 2, "--seq-length", 16)
    given = ("--dataset", text, "--evaluate", text, *few)
    run("prune", "--model", dense, "--sparsity", 0.5, *given, "--topup", "uniform", "--output", tmp_path / "sparse")
    names = ("texts", "output", "saveable", "unquantized", "directory", "prune")
    assert calls == Counter([f"check_{name}" for name in names])
