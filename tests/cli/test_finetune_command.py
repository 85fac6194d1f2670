import json
import re
from unittest.mock import Mock

import pytest

from optimum_neuronal import FinetuneConfig
from optimum_neuronal.cli.finetune_command import FinetuneCommand
from optimum_neuronal.cli.neuronal_command import make_parsers
from optimum_neuronal.training import finetune as module


SHORT = ("--steps", 4, "--seq-length", 16, "--batch-size", 4, "--learning-rate", 0.03)


@pytest.fixture
def sparse(run, dense, tmp_path):
    folder = tmp_path / "sparse"
    method = ("--sparsity", 0.5, "--saliency", "magnitude", "--topup", "uniform")
    run("prune", "--model", dense, *method, "--output", folder)
    return folder


def test_prune_finetune_evaluate_inspect(run, dense, sparse, tmp_path):
    text, output = tmp_path / "text.txt", tmp_path / "tuned"
    tests = ("--evaluate", text, "--window", 16, "--max-windows", 0)
    given = ("--model", sparse, "--teacher", dense, "--dataset", text, *tests)
    shown = run("finetune", *given, *SHORT, "--output", output)
    assert "fine-tuned" in shown and "(before)" in shown and "(after)" in shown
    assert f'from_pretrained("{output}")' in shown
    assert "fine-tuning for 4 steps of 4 x 16 tokens of text.txt, toward dense" in run.err
    assert "step 4 of 4: perplexity" in run.err
    after = json.loads((output / "neuronal_report.json").read_text())["training"][0]["evaluation"]["text.txt"]["after"]
    shown = run("evaluate", "--model", output, "--dataset", text, "--window", 16, "--dtype", "float32")
    assert f"{after:.2f}" in shown
    assert "Verified" in run("inspect", output)


def test_an_interrupt_says_how_to_go_on(run, dense, sparse, tmp_path, monkeypatch, capsys):
    """In the packed format too."""
    interrupt = Mock(side_effect=KeyboardInterrupt)
    models = ("--format", "packed", "--model", sparse, "--teacher", dense, "--output", tmp_path / "tuned")
    given = (*models, "--dataset", tmp_path / "text.txt", *SHORT)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(module.SparseTrainer, "training_step", interrupt)
        run("finetune", *given)
    assert re.search("the same command resumes from here; .*delete .*unfinished", capsys.readouterr().err)
    shown = run("finetune", *given)
    assert "Saved to" in shown and "import optimum_neuronal" in shown


def test_flags_are_the_fields_of_the_config():
    words = "finetune --model m --output o --minutes 5 --lora 8 --no-bf16 --kl-weight 0.5"
    config = FinetuneCommand(make_parsers()["neuronal"].parse_args(words.split())).config()
    assert config == FinetuneConfig(minutes=5.0, lora=8, bf16=False, kl_weight=0.5)
