import json
import subprocess
import sys

import pytest


PRUNE = ("prune", "--sparsity", "0.7", "--output", "new", "--model", "dense")
COMMANDS = (
    (("prune", "--model", "dense", "--output", "new"), "--sparsity is missing: .* or a preset or config"),
    (("prune", "--model", "dense", "--sparsity", "0.7"), "--output is missing"),
    ((*PRUNE, "--config", "gone.json"), "--config gone.json does not exist"),
    ((*PRUNE, "--dataset", "gone.txt"), "'gone.txt' does not exist"),
    ((*PRUNE, "--dataset", "wikitext-2"), "Did you mean 'wikitext2'"),
    ((*PRUNE, "--evaluate", "c4", "gone.jsonl:code"), "'gone.jsonl' does not exist"),
    ((*PRUNE, "--dry-run", "--evaluate", "notes.xyz"), "'notes.xyz' does not exist, or does not end in .txt"),
    ((*PRUNE[:-1], "./dens"), "The directory ./dens does not exist"),
    (("evaluate", "--model", "dense", "--include-path", "gone"), "--include-path gone does not exist"),
    (("evaluate", "--model", "empty"), "There is no config.json in empty: name the directory of a model"),
    (("prune", *PRUNE[1:-1], "gone.gguf"), "The file gone.gguf does not exist"),
    (("prune", *PRUNE[1:-1], "notes.xyz"), "notes.xyz is a file: name the directory of a model, a Hub id or a .gguf"),
    (("prune", *PRUNE[1:-1], "adapter"), "adapter is a PEFT adapter: merge it into its model"),
    (("prune", *PRUNE[1:-1], "pipeline"), "pipeline is a diffusers pipeline, not a language model"),
    (("inspect", "./gone"), "The directory ./gone does not exist"),
)
CODE = """
import json, sys, time
from optimum.commands import optimum_cli
from optimum_neuronal.cli.neuronal_command import NeuronalCommand
optimum_cli.load_subpackages = lambda: None
optimum_cli.load_optimum_namespace_cli_commands = lambda: [(NeuronalCommand, None)]
for words in json.loads(sys.argv[1]):
    sys.argv, start = ['optimum-cli', 'neuronal', *words], time.perf_counter()
    try: optimum_cli.main()
    except SystemExit as stop:
        heavy = {'torch', 'transformers', 'datasets', 'numpy'} & sys.modules.keys()
        print("\\n" + json.dumps([stop.code, time.perf_counter() - start, sorted(heavy)]))
"""


def test_mistakes_and_help_need_nothing_heavy(tmp_path):
    """In one process for all commands; each takes a part of a second."""
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, file in (("adapter", "adapter_config.json"), ("pipeline", "model_index.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "notes.xyz").write_text("text of an unknown kind")
    words = [*(words for words, _ in COMMANDS), ("prune", "--help")]
    result = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(words)], capture_output=True, text=True, cwd=tmp_path
    )
    *found, last = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert len(found) == len(COMMANDS), result.stderr
    for (words, message), (error, seconds, heavy) in zip(COMMANDS, found):
        with pytest.raises(SystemExit, match=message):
            raise SystemExit(error)
        assert not heavy and seconds < 2, words
    assert last[0] == 0 and not last[2] and "usage: optimum-cli neuronal prune --model" in result.stdout
