import pytest
import torch
from forward import squared_norms
from trial_helpers import dense_masks, state, unchanged, uniform

from optimum_neuronal.blocks.block_inputs import Stream
from optimum_neuronal.blocks.statistics import activation
from optimum_neuronal.model.change import Zeros
from optimum_neuronal.model.projections import trial_weights
from optimum_neuronal.saliency.plan import Plan
from optimum_neuronal.trials.alignment import (
    AlignmentErrors,
    Deviations,
    final_norms,
    printed_deviation,
    signed_deviation,
)


def test_both_kinds_by_hand():
    dense, sparse = torch.tensor([[1.0, 9.0], [1.0, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    assert signed_deviation(dense, sparse).tolist() == pytest.approx([0, 5**0.5 - 1])
    assert printed_deviation(dense, sparse).tolist() == pytest.approx([0.25, 0.25])


def activations(model, ids, projections):
    """Of all projections, and of the model's last norm, by whole forwards."""
    by_name = {name: activation(norms) for name, norms in squared_norms(model, ids, projections).items()}
    return by_name | {"model.norm": activation(model.model(ids).last_hidden_state.square().sum(dim=1))}


def test_deviation_from_the_dense_model_by_whole_forwards(evaluator, llama, ids):
    """Masks come from the dense model's activations. A block's own place is what reads its output."""
    before, plan, projections = state(llama), uniform(evaluator, 0.6), evaluator.decoder.projections
    deviation = evaluator.measure(Deviations("dense"), [plan])
    assert unchanged(llama, before)
    assert deviation.error == pytest.approx(evaluator.measure(AlignmentErrors("dense"), [plan])[0], rel=1e-6)
    dense, masks = activations(llama, ids[:4], projections), dense_masks(llama, ids[:4], evaluator, plan)
    with trial_weights(list(projections.values()), lambda p: Zeros(masks[p.name])):
        sparse = activations(llama, ids[:4], projections)
    readers = {f"model.layers.{i}": f"model.layers.{i + 1}.self_attn.q_proj" for i in (0, 1)}
    readers["model.layers.2"] = "model.norm"
    for i, name in ((i, name) for i in range(3) for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")):
        readers[f"model.layers.{i}.{name}"] = f"model.layers.{i}.{name}"
    for place, reader in readers.items():
        difference = (dense[reader] - sparse[reader]).double()
        torch.testing.assert_close(deviation.places[place], difference, rtol=1e-3, atol=1e-3)
        assert difference.abs().max() > 0.05, "there is something to compare"


def test_the_final_norm_runs_where_its_weights_are():
    """Hidden states may wait in CPU memory. The device "meta" stands for an accelerator."""
    norm, stream = torch.nn.LayerNorm(8, device="meta"), Stream([torch.ones(2, 3, 8), torch.ones(1, 3, 8)])
    norms = final_norms(norm, stream, torch.device("meta"))
    assert norms.value.device.type == "meta" and norms.value.shape == (3, 8)


def test_on_the_sparse_stream_blocks_are_compared_on_the_same_input(evaluator):
    """If only the middle block is pruned, it deviates as in the dense model, and the next block not at all."""
    middle = dict.fromkeys(evaluator.decoder.blocks[1].pruned_names, 0.6)
    plan = Plan({**uniform(evaluator, 0.0).sparsity, **middle})
    own, dense = (evaluator.measure(Deviations(reference), [plan]).places for reference in ("sparse-stream", "dense"))
    for name, place in own.items():
        if name.startswith("model.layers.1"):
            torch.testing.assert_close(place, dense[name], rtol=1e-3, atol=1e-3)
            assert place.abs().max() > 0.05, name
        else:
            assert place.abs().max() < 1e-4, name
    assert dense["model.layers.2"].abs().max() > 0.05, "the dense model's own input differs from the pruned one's"
