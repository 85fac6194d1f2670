import pytest
import torch
from forward import squared_norms
from sweeps import make_sweep, uniform

from optimum_neuronal.engine.capture import inference, next_token_logits
from optimum_neuronal.engine.statistics import SquaredNorms


def test_dense_norms_are_the_models_own(any_model, ids):
    with inference(any_model):
        sweep = make_sweep(any_model, ids)
        ours = {name: norms.value for block in sweep.dense_norms() for name, norms in block.items()}
    for name, expected in squared_norms(any_model, ids[:4], sweep.decoder.projections).items():
        torch.testing.assert_close(ours[name], expected)


def test_squared_norms_of_an_alignment_set_are_the_first_sequences(llama, ids):
    with inference(llama):
        norms = make_sweep(llama, ids).dense_norms()[0]["model.layers.0.self_attn.q_proj"]
    assert isinstance(norms, SquaredNorms) and norms.value.shape == (4, 32)


def test_dense_output_is_the_models_own(any_model, ids):
    """Whatever a head does with the last block's output: scales, caps, norms."""
    with inference(any_model):
        sweep = make_sweep(any_model, ids)
        hidden = sweep.engine.dense().output.batches
        logits = next_token_logits(sweep.decoder, ids[:1], hidden[0], sweep.engine.runner.wrap(ids), "cpu")
        torch.testing.assert_close(logits, any_model(ids[:1]).logits, rtol=1e-4, atol=1e-4)
        (error,) = sweep.output_errors([uniform(sweep, 0.0)], "kl", None)
        assert error == pytest.approx(0, abs=1e-6)
