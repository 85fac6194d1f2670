import subprocess
import sys

import pytest


def test_the_commands_are_listed_and_the_model_is_required(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--help")
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    for name in (
        "prune",
        "evaluate",
        "compare",
        "inspect",
        "convert",
        "speed",
        "env",
        "demo",
    ):
        assert f"\n    {name} " in shown, name
    with pytest.raises(SystemExit):
        run("evaluate")
    assert "required: --model" in capsys.readouterr().err


def test_parsers_need_nothing_heavy():
    """`optimum-cli` builds those of all plug-ins at every start; a wrong sparsity is known by then."""
    code = (
        "import sys; from optimum_neuronal.__main__ import main\n"
        "sys.argv = ['optimum-cli', 'neuronal', 'prune', '--model', 'x', '--sparsity', '70']\n"
        "try: main()\n"
        "except SystemExit: print({'torch', 'transformers', 'numpy', 'tabulate'} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()" and "Did you mean 0.7?" in result.stderr
