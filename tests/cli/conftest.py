"""Fixtures: `optimum-cli neuronal ...` in this process, and a model for it."""

import pytest
from conftest import make_model

from optimum_neuronal.cli.neuronal_command import main


@pytest.fixture
def run(capsys):
    """Runs `optimum-cli neuronal ...` in this process and returns what it printed; `run.err` is what went elsewhere."""

    def call(*arguments):
        main([*map(str, arguments)])
        out, call.err = capsys.readouterr()
        return out

    return call


@pytest.fixture
def dense(tmp_path, tokenizer):
    """A saved model with its tokenizer, and a text that both know."""
    make_model("llama", vocab_size=256).save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(" ".join(f"w{(i * 7) % 60}" for i in range(2000)))
    return tmp_path / "dense"
