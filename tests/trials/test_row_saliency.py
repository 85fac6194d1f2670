import pytest
import torch
from forward import squared_norms
from sweeps import make_sweep, uniform

from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.statistics import activation
from optimum_neuronal.saliency.wanda import Wanda
from optimum_neuronal.trials.row_saliency import row_saliency


def test_rows_matter_as_much_as_their_weights_on_the_plans_own_stream(llama, ids):
    """A plan that prunes nothing has the dense model's stream; with another, later blocks receive something else."""
    with inference(llama):
        sweep = make_sweep(llama, ids)
        projections = sweep.decoder.projections
        dense = squared_norms(llama, ids[:4], projections)
        untouched, pruned = (row_saliency(sweep.engine, uniform(sweep, share), None) for share in (0.0, 0.6))
    assert list(untouched) == list(pruned) == list(projections)
    for name, projection in projections.items():
        expected = (projection.weight.abs() * activation(dense[name])).double().sum(dim=1)
        torch.testing.assert_close(untouched[name], expected, rtol=1e-4, atol=1e-4)
        first = name.startswith("model.layers.0.")
        assert torch.allclose(pruned[name], expected, rtol=1e-4) == first, name


def test_one_run_of_the_plans_stream_is_all_that_it_costs(llama, ids):
    with inference(llama):
        sweep = make_sweep(llama, ids)
        plan = uniform(sweep)
        sweep.engine.stream_of(plan)
        before = sweep.engine.runner.block_forwards
        sweep.row_saliency(plan, None)
    assert sweep.engine.runner.block_forwards == before


def test_a_saliency_that_is_nan_is_named(llama, ids, monkeypatch):
    """It would be a plan of NaN otherwise, of which nobody could tell where it came from."""
    monkeypatch.setattr(Wanda, "score", lambda self, weight, activation: weight * torch.nan)
    with (
        inference(llama),
        pytest.raises(ValueError, match=r"saliency of model.layers.0.self_attn.q_proj is not finite"),
    ):
        sweep = make_sweep(llama, ids)
        row_saliency(sweep.engine, uniform(sweep), None)
