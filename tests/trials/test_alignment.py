import math

import pytest
import torch
from by_hand import make_experts
from forward import squared_norms, token_counts
from trial_helpers import dense_masks, make_evaluator, state, unchanged, uniform

from optimum_neuronal.blocks.block_inputs import Stream
from optimum_neuronal.blocks.statistics import SquaredNorms, activation
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.change import Zeros
from optimum_neuronal.model.projections import trial_weights
from optimum_neuronal.saliency.plan import Plan
from optimum_neuronal.topup.neuronal import NeuronAL
from optimum_neuronal.trials.alignment import (
    METRICS,
    AlignmentErrors,
    Deviations,
    alignment_error,
    final_norms,
    printed_deviation,
    signed_deviation,
    total_error,
)


def error(dense, sparse, **options) -> float:
    return alignment_error(torch.tensor(dense), torch.tensor(sparse), **options).item()


def test_equation_3_by_hand():
    # Activations 1 3 and 1 1: (1/4, 3/4) - (1/2, 1/2) has norm sqrt(2)/4. The second sequence is aligned. in = 2.
    assert error([[1.0, 9.0], [4.0, 4.0]], [[1.0, 1.0], [4.0, 4.0]]) == pytest.approx(2**0.5 / 4 / 2)


def test_pooled_takes_one_activation_over_all_sequences():
    dense, sparse = [[1.0, 0.0], [1.0, 2.0]], [[4.0, 4.0], [4.0, 4.0]]  # mean of the dense ones: 1 1
    assert error(dense, sparse, scope="pooled") == pytest.approx(0, abs=1e-8)
    assert error(dense, sparse, scope="sequence") > 0.1


def test_cosine_and_kl_by_hand():
    assert error([[9.0, 16.0]], [[16.0, 9.0]], metric="cosine") == pytest.approx((1 - 24 / 25) / 2)
    assert error([[9.0]], [[16.0]], metric="cosine") == 0, "one feature has no direction"
    divergence = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)  # of the shares 1/4 3/4 from 1/2 1/2
    assert error([[1.0, 9.0]], [[1.0, 1.0]], metric="kl") == pytest.approx(divergence / 2)
    silenced, nearly = (error([[1.0, 1.0]], [[value, 1.0]], metric="kl") for value in (0.0, 0.01))
    assert 1 < silenced < 20 and silenced > nearly, "large and finite for a silenced feature"


@pytest.mark.parametrize("metric", METRICS)
def test_errors_are_never_negative_or_infinite_and_ignore_the_scale(metric):
    """Candidates are abandoned by what they have added up so far, so nothing may be subtracted later."""
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(3, 5, generator=generator)
    assert alignment_error(norms, 49 * norms, metric=metric).item() == pytest.approx(0, abs=1e-8)
    for size in (1e-7, 1e-3, 1):
        dense = torch.rand(50, 40, generator=generator)
        assert alignment_error(dense, dense + size * torch.rand(50, 40, generator=generator), metric=metric) >= 0
    zeros, ones = torch.zeros(2, 4), torch.ones(2, 4)
    assert alignment_error(zeros, zeros, metric=metric).item() == 0
    assert all(torch.isfinite(alignment_error(*dead, metric=metric)) for dead in ((zeros, ones), (ones, zeros)))


def test_experts_count_by_their_share_of_the_tokens():
    projections = make_experts(3).pruned
    dense, sparse = ({p.name: SquaredNorms() for p in projections} for _ in range(2))
    for tokens, projection in zip((1, 3, 0), projections):
        rows = torch.arange(tokens)
        dense[projection.name].update_routed(torch.ones(tokens, 2), rows, 4)
        sparse[projection.name].update_routed(torch.tensor([[1.0, 3.0]]).expand(tokens, 2), rows, 4)
    single = pytest.approx(error([[1.0, 1.0]], [[1.0, 9.0]]))
    for count, scope in ((3, "sequence"), (1, "sequence"), (2, "pooled")):
        assert total_error(projections[:count], dense, sparse, scope, "l2").item() == single


def test_dense_alignment_by_brute_force(any_model, ids):
    """Reference "dense": masks from the dense model's activations, then one forward of the whole sparse model."""
    with inference(any_model):
        evaluator = make_evaluator(any_model, ids)
        plan, projections = NeuronAL().block_plan(evaluator.decoder, 0.6, 0.1), evaluator.decoder.projections
        (found,) = evaluator.measure(AlignmentErrors("dense"), [plan])
        dense, tokens = squared_norms(any_model, ids[:4], projections), token_counts(any_model, ids[:4], projections)
        masks = dense_masks(any_model, ids[:4], evaluator, plan)
        with trial_weights(list(projections.values()), lambda p: Zeros(masks[p.name])):
            sparse = squared_norms(any_model, ids[:4], projections)
    expected = 0
    for name, projection in projections.items():
        together = [tokens[other.name] for other in projections.values() if other.group == projection.group]
        share = 1 if projection.expert is None else tokens[name] / sum(together)
        for d, s in zip(dense[name].sqrt(), sparse[name].sqrt()):
            expected += share * ((d / max(d.sum(), 1e-30) - s / max(s.sum(), 1e-30)).norm() / len(d)).item()
    assert found == pytest.approx(expected, rel=1e-4)


def test_first_inputs_are_aligned_on_the_sparse_stream(llama, ids):
    """A block's first input is the same in both runs, so q, k and v do not count."""
    with inference(llama):
        everything, qkv = (
            evaluator.measure(AlignmentErrors("sparse-stream"), [uniform(evaluator)])
            for evaluator in (make_evaluator(llama, ids), make_evaluator(llama, ids, targets=["[qkv]_proj"]))
        )
    assert everything[0] > 0 and qkv == [0.0]


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
