import pytest
import torch
from forward import squared_norms
from sweeps import make_sweep, state, unchanged, uniform

from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.statistics import activation
from optimum_neuronal.model.trial import trial_weights
from optimum_neuronal.sparsity.masks import Zeros, mask_rows
from optimum_neuronal.sparsity.plan import SparsityPlan
from optimum_neuronal.trials.deviation import find_deviation


def activations(model, ids, projections):
    """Of all projections, and of the model's last norm, by whole forwards."""
    found = {name: activation(norms) for name, norms in squared_norms(model, ids, projections).items()}
    last = model.model(ids).last_hidden_state.square().sum(dim=1)
    return found | {"model.norm": activation(last)}


def test_deviation_from_the_dense_model_by_whole_forwards(llama, ids):
    """Masks from the dense model's activations. A block's own place is what reads its output."""
    with inference(llama):
        sweep, before = make_sweep(llama, ids), state(llama)
        plan, projections = uniform(sweep, 0.6), sweep.decoder.projections
        found = find_deviation(sweep.engine, plan, "dense", "sequence", "l2", None)
        assert unchanged(llama, before)
        dense = activations(llama, ids[:4], projections)

        def mask_of(projection):
            score = projection.weight.abs() * dense[projection.name]
            return Zeros(mask_rows(score, plan.row_counts(projection.name, projection.shape)))

        with trial_weights(list(projections.values()), mask_of):
            sparse = activations(llama, ids[:4], projections)
        (error,) = sweep.alignment_errors([plan], "dense", "sequence", "l2", None)
    read_by = {f"model.layers.{i}": f"model.layers.{i + 1}.self_attn.q_proj" for i in (0, 1)}
    read_by["model.layers.2"] = "model.norm"
    inside = ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    assert found.error == pytest.approx(error, rel=1e-6)
    for name in (*read_by, *(f"model.layers.{i}.{name}" for i in range(3) for name in inside)):
        reader = read_by.get(name, name)
        difference = (dense[reader] - sparse[reader]).double()
        torch.testing.assert_close(found.places[name], difference, rtol=1e-3, atol=1e-3)
        assert difference.abs().max() > 0.05, "there is something to compare"


@pytest.mark.parametrize("reference", ["sparse-stream", "dense"])
def test_a_plan_that_prunes_nothing_deviates_nowhere(llama, ids, reference):
    with inference(llama):
        sweep = make_sweep(llama, ids)
        found = find_deviation(sweep.engine, uniform(sweep, 0.0), reference, "sequence", "l2", None)
        fed = {
            sweep.decoder.place_fed_by(block, projection).name
            for block in sweep.decoder.blocks
            for projection in block.pruned
        }
    assert found.error == pytest.approx(0, abs=1e-6)
    assert found.places.keys() == fed and all(place.abs().max() < 1e-4 for place in found.places.values())


def test_on_the_sparse_stream_blocks_are_compared_on_the_same_input(llama, ids):
    """If only the middle block is pruned, it deviates as in the dense model, and the block behind it not at all."""
    with inference(llama):
        sweep = make_sweep(llama, ids)
        middle = dict.fromkeys(sweep.decoder.blocks[1].pruned_names, 0.6)
        plan = SparsityPlan({**uniform(sweep, 0.0).sparsity, **middle})
        own, dense = (
            find_deviation(sweep.engine, plan, reference, "sequence", "l2", None).places
            for reference in ("sparse-stream", "dense")
        )
    for name, place in own.items():
        if name.startswith("model.layers.1"):
            torch.testing.assert_close(place, dense[name], rtol=1e-3, atol=1e-3)
            assert place.abs().max() > 0.05, name
        else:
            assert place.abs().max() < 1e-4, name
    assert dense["model.layers.2"].abs().max() > 0.05, "which the dense model's own input tells from the pruned one's"
