import sys

import pytest
import torch

from optimum_neuronal.demo import run
from optimum_neuronal.demo.run import load_tiny_model, run_demo


def test_the_tiny_model_computes_in_float32_and_knows_its_tokenizer():
    model, tokenizer = load_tiny_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"
    assert len(tokenizer) <= model.get_input_embeddings().num_embeddings


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("precious")
    monkeypatch.setattr(run, "load_tiny_model", None)
    with pytest.raises((OSError, ValueError), match="is a file"):
        run_demo(tmp_path / "file", print)


def test_a_model_that_does_not_reload_is_an_error_with_its_message(tmp_path):
    with pytest.raises(RuntimeError, match="The saved model could not be reloaded: .*"):
        run._reload(tmp_path / "absent")


def test_the_reloading_process_never_imports_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RELOAD", "import sys; print(sys.argv[1:], 'optimum_neuronal' in sys.modules)")
    assert run._reload("somewhere") == f"{['somewhere', run.PROMPT]} False"
    assert "optimum_neuronal" in sys.modules


def test_the_verdict_says_who_loses_least():
    perplexities = {(s, run.OURS): 20.0 + s for s in run.SPARSITIES}
    perplexities |= {(s, run.BASELINE): 20.65 for s in run.SPARSITIES}
    perplexities |= {(s, run.PAPER): 21.5 - s for s in run.SPARSITIES}
    first, *_, last = run._verdict(perplexities, 10.0).split("\n")
    assert first.startswith("At 60% default loses least.")
    assert first.endswith("2.06 with Wanda, uniform; 2.09 with Wanda, NeuronAL; 2.06 with default.")
    assert last.startswith("At 80% Wanda, uniform loses least.")


def test_the_tiny_model_is_small_and_comes_with_its_licence():
    assert sum(file.stat().st_size for file in run.TINY_MODEL.iterdir()) < 6e6
    assert "Python Software Foundation" in (run.TINY_MODEL / "NOTICE").read_text()
