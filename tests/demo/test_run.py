import sys

import pytest
import torch

from optimum_neuronal.demo import run
from optimum_neuronal.demo.run import load_tiny_model


def test_the_tiny_model_is_small_computes_in_float32_and_comes_with_tokenizer_and_licence():
    model, tokenizer = load_tiny_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"
    assert len(tokenizer) <= model.get_input_embeddings().num_embeddings
    assert sum(file.stat().st_size for file in run.TINY_MODEL.iterdir()) < 6e6
    assert "Python Software Foundation" in (run.TINY_MODEL / "NOTICE").read_text()


def test_reloading_needs_plain_transformers_alone(monkeypatch):
    """RELOAD asserts in its process that the package is not imported."""
    shown = run._reload(run.TINY_MODEL)
    assert shown.startswith("0.00% of the projections' weights are zero.") and run.PROMPT in shown
    monkeypatch.setattr(run, "RELOAD", "raise ValueError('not there')")
    with pytest.raises(RuntimeError, match="The saved model could not be reloaded: (?s:.*)not there"):
        run._reload("absent")
    monkeypatch.setattr(run, "RELOAD", "import sys; print(sys.argv[1:], 'optimum_neuronal' in sys.modules)")
    assert run._reload("somewhere") == f"{['somewhere', run.PROMPT]} False" and "optimum_neuronal" in sys.modules


def test_the_verdict_says_who_loses_least():
    perplexities = {(s, run.OURS): 20.0 + s for s in run.SPARSITIES}
    perplexities |= {(s, run.BASELINE): 20.65 for s in run.SPARSITIES}
    perplexities |= {(s, run.PAPER): 21.5 - s for s in run.SPARSITIES}
    first, *_, last = run._verdict(perplexities, 10.0).split("\n")
    assert first.startswith("At 60% default loses least.")
    assert first.endswith("2.06 with Wanda, uniform; 2.09 with Wanda, NeuronAL; 2.06 with default.")
    assert last.startswith("At 80% Wanda, uniform loses least.")
