"""`optimum-cli` imports the stub alone, which hands its words to the package's own parser."""

import importlib
import subprocess
import sys

import pytest
from packed_models import make_zeroed

from optimum.commands import optimum_cli
from optimum_neuronal import save_pretrained


SCRIPT = """
import sys
from optimum.commands import optimum_cli
from optimum.commands.register.register_neuronal import NeuronalCommand
optimum_cli.load_optimum_namespace_cli_commands = lambda: [(NeuronalCommand, None)]
for words in ("--help", "neuronal", "neuronal --help", "neuronal prune --help", "neuronal compare -h"):
    sys.argv = ["optimum-cli", *words.split()]
    try:
        optimum_cli.main()
    except SystemExit:
        pass
assert not {"torch", "transformers", "optimum_neuronal"} & sys.modules.keys()
import optimum_neuronal
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(FOLDER)
assert any(name.endswith("packed_mask") for name in model.state_dict())
"""


@pytest.fixture
def optimum(monkeypatch):
    """Runs `optimum-cli` in this process."""
    stub = importlib.import_module("optimum.commands.register.register_neuronal")
    monkeypatch.setattr(optimum_cli, "load_subpackages", lambda: None)  # reads what is installed anew at every call
    monkeypatch.setattr(optimum_cli, "load_optimum_namespace_cli_commands", lambda: [(*stub.REGISTER_COMMANDS, None)])

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["optimum-cli", *words])
        optimum_cli.main()

    return call


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        ("--help", 0, "neuronal            NeuronAL: prune language models"),
        ("neuronal --version", 0, "optimum-neuronal "),
        ("neuronal bogus", 2, "invalid choice: 'bogus'"),
        ("neuronal prune --model x", "prune: error: --output is missing", ""),
        ("neuronal inspect -- /gone", "inspect: error: /gone is neither a directory", ""),
    ],
)
def test_all_words_reach_the_parser(optimum, capsys, words, code, shown):
    with pytest.raises(SystemExit) as stop:
        optimum(*words.split())
    assert str(stop.value.code).startswith(str(code)) and shown in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("neuronal", "optimum-cli neuronal prune --help"),
        ("neuronal --help", "usage: optimum-cli neuronal [-h] [--version]"),
        ("neuronal prune --model x --help", "usage: optimum-cli neuronal prune --model MODEL"),
    ],
)
def test_help_is_shown(optimum, capsys, words, shown):
    optimum(*words.split())
    assert shown in capsys.readouterr().out


def test_the_package_is_imported_when_a_command_runs_and_registers_its_quantizers_then(tmp_path):
    """Not to show help, which would take seconds."""
    save_pretrained(make_zeroed("llama"), tmp_path, format="packed")
    code = f"FOLDER = {str(tmp_path)!r}\n{SCRIPT}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
