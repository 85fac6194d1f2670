import math

import pytest
import torch
from forward import squared_norms, token_counts
from trial_helpers import make_trials, state, unchanged, uniform

from optimum_neuronal.blocks.block_inputs import Stream, inference
from optimum_neuronal.blocks.statistics import SquaredNorms, activation
from optimum_neuronal.model.change import Zeros
from optimum_neuronal.model.projections import Projection, trial_weights
from optimum_neuronal.saliency.plan import Plan, mask_rows, row_counts
from optimum_neuronal.topup.neuronal import block_plan
from optimum_neuronal.trials.alignment import METRICS, alignment_error, final_norms, total_error


def test_equation_3_by_hand():
    dense = torch.tensor([[1.0, 9.0], [4.0, 4.0]])  # activations 1 3 and 2 2
    sparse = torch.tensor([[1.0, 1.0], [4.0, 4.0]])  # activations 1 1 and 2 2
    # first sequence: (1/4, 3/4) - (1/2, 1/2) has norm sqrt(2)/4; the second is aligned; both are divided by in = 2
    assert alignment_error(dense, sparse).item() == pytest.approx(2**0.5 / 4 / 2)


def test_pooled_takes_one_activation_over_all_sequences():
    dense = torch.tensor([[1.0, 0.0], [1.0, 2.0]])  # mean 1 1
    sparse = torch.tensor([[4.0, 4.0], [4.0, 4.0]])
    assert alignment_error(dense, sparse, "pooled").item() == pytest.approx(0, abs=1e-8)
    assert alignment_error(dense, sparse, "sequence").item() > 0.1


def test_cosine_by_hand():
    dense, sparse = torch.tensor([[9.0, 16.0]]), torch.tensor([[16.0, 9.0]])  # activations 3 4 and 4 3
    assert alignment_error(dense, sparse, metric="cosine").item() == pytest.approx((1 - 24 / 25) / 2)
    assert alignment_error(dense[:, :1], sparse[:, :1], metric="cosine").item() == 0  # one feature has no direction


def test_kl_by_hand():
    dense, sparse = torch.tensor([[1.0, 9.0]]), torch.tensor([[1.0, 1.0]])  # shares 1/4 3/4 and 1/2 1/2
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert alignment_error(dense, sparse, metric="kl").item() == pytest.approx(expected / 2)
    silenced, nearly = (
        alignment_error(torch.tensor([[1.0, 1.0]]), torch.tensor([[value, 1.0]]), metric="kl").item()
        for value in (0.0, 0.01)
    )
    assert 1 < silenced < 20 and silenced > nearly, "of a silenced feature large and finite"


@pytest.mark.parametrize("metric", METRICS)
def test_no_error_is_negative_infinite_or_of_scale(metric):
    """Candidates are abandoned by what they have added up so far, so nothing may be taken off again."""
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(3, 5, generator=generator)
    assert alignment_error(norms, 49 * norms, metric=metric).item() == pytest.approx(0, abs=1e-8)
    for size in (1e-7, 1e-3, 1):
        dense = torch.rand(50, 40, generator=generator)
        assert alignment_error(dense, dense + size * torch.rand(50, 40, generator=generator), metric=metric) >= 0
    zeros, ones = torch.zeros(2, 4), torch.ones(2, 4)
    assert alignment_error(zeros, zeros, metric=metric).item() == 0
    for dead in (alignment_error(zeros, ones, metric=metric), alignment_error(ones, zeros, metric=metric)):
        assert torch.isfinite(dead)


def test_experts_count_by_their_share_of_the_tokens():
    mixture = torch.nn.Module()
    projections = [Projection(f"experts.{e}.up", "up", mixture, True, "up", e) for e in range(3)]
    dense, sparse = ({p.name: SquaredNorms() for p in projections} for _ in range(2))
    for tokens, projection in zip((1, 3, 0), projections):
        rows = torch.arange(tokens)
        dense[projection.name].update_routed(torch.ones(tokens, 2), rows, 4)
        sparse[projection.name].update_routed(torch.tensor([[1.0, 3.0]]).expand(tokens, 2), rows, 4)
    single = alignment_error(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 9.0]]))
    assert total_error(projections, dense, sparse, "sequence", "l2").item() == pytest.approx(single.item())
    alone = total_error(projections[:1], dense, sparse, "sequence", "l2")
    both = total_error(projections[:2], dense, sparse, "pooled", "l2")
    assert alone.item() == pytest.approx(both.item()) == pytest.approx(single.item())


def test_dense_alignment_by_brute_force(any_model, ids):
    """Reference "dense": masks from the dense model's activations, then one forward of the whole sparse model."""
    with inference(any_model):
        trials = make_trials(any_model, ids)
        plan = block_plan(trials.decoder, 0.6, 0.1)
        (error,) = trials.alignment_errors([plan], "dense", "sequence", "l2", label=None)
        projections = trials.decoder.projections
        dense = squared_norms(any_model, ids[:4], projections)

        def mask_of(projection):
            norms = dense[projection.name]
            score = projection.weight.abs() * norms.mean(dim=0).sqrt()
            return Zeros(mask_rows(score, row_counts(plan.sparsity[projection.name], projection.shape)))

        tokens = token_counts(any_model, ids[:4], projections)
        with trial_weights(list(projections.values()), mask_of):
            sparse = squared_norms(any_model, ids[:4], projections)
    expected = 0
    for name, projection in projections.items():
        together = [tokens[other.name] for other in projections.values() if other.group == projection.group]
        share = 1 if projection.expert is None else tokens[name] / sum(together)
        for d, s in zip(dense[name].sqrt(), sparse[name].sqrt()):
            expected += share * ((d / max(d.sum(), 1e-30) - s / max(s.sum(), 1e-30)).norm() / len(d)).item()
    assert error == pytest.approx(expected, rel=1e-4)


def test_first_inputs_are_aligned_on_the_sparse_stream(llama, ids):
    """There a block's first input is the same in both runs, so q, k and v do not count."""
    with inference(llama):
        everything, qkv = (
            trials.alignment_errors([uniform(trials)], "sparse-stream", "sequence", "l2", label=None)
            for trials in (make_trials(llama, ids), make_trials(llama, ids, targets=["[qkv]_proj"]))
        )
    assert everything[0] > 0 and qkv == [0.0]


def activations(model, ids, projections):
    """Of all projections, and of the model's last norm, by whole forwards."""
    found = {name: activation(norms) for name, norms in squared_norms(model, ids, projections).items()}
    last = model.model(ids).last_hidden_state.square().sum(dim=1)
    return found | {"model.norm": activation(last)}


def test_deviation_from_the_dense_model_by_whole_forwards(trials, llama, ids):
    """Masks from the dense model's activations. A block's own place is what reads its output."""
    before = state(llama)
    plan, projections = uniform(trials, 0.6), trials.decoder.projections
    found = trials.deviation(plan, "dense", "sequence", "l2", None)
    assert unchanged(llama, before)
    dense = activations(llama, ids[:4], projections)

    def mask_of(projection):
        score = projection.weight.abs() * dense[projection.name]
        return Zeros(mask_rows(score, plan.row_counts(projection.name, projection.shape)))

    with trial_weights(list(projections.values()), mask_of):
        sparse = activations(llama, ids[:4], projections)
    (error,) = trials.alignment_errors([plan], "dense", "sequence", "l2", None)
    read_by = {f"model.layers.{i}": f"model.layers.{i + 1}.self_attn.q_proj" for i in (0, 1)}
    read_by["model.layers.2"] = "model.norm"
    inside = ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    assert found.error == pytest.approx(error, rel=1e-6)
    for name in (*read_by, *(f"model.layers.{i}.{name}" for i in range(3) for name in inside)):
        reader = read_by.get(name, name)
        difference = (dense[reader] - sparse[reader]).double()
        torch.testing.assert_close(found.places[name], difference, rtol=1e-3, atol=1e-3)
        assert difference.abs().max() > 0.05, "there is something to compare"


def test_the_final_norm_runs_where_its_weights_are():
    """Hidden states may wait in CPU memory. The device "meta" stands for an accelerator."""
    norm, stream = torch.nn.LayerNorm(8, device="meta"), Stream([torch.ones(2, 3, 8), torch.ones(1, 3, 8)])
    found = final_norms(norm, stream, torch.device("meta"))
    assert found.value.device.type == "meta" and found.value.shape == (3, 8)


def test_on_the_sparse_stream_blocks_are_compared_on_the_same_input(trials):
    """If only the middle block is pruned, it deviates as in the dense model, and the block behind it not at all."""
    middle = dict.fromkeys(trials.decoder.blocks[1].pruned_names, 0.6)
    plan = Plan({**uniform(trials, 0.0).sparsity, **middle})
    own, dense = (
        trials.deviation(plan, reference, "sequence", "l2", None).places for reference in ("sparse-stream", "dense")
    )
    for name, place in own.items():
        if name.startswith("model.layers.1"):
            torch.testing.assert_close(place, dense[name], rtol=1e-3, atol=1e-3)
            assert place.abs().max() > 0.05, name
        else:
            assert place.abs().max() < 1e-4, name
    assert dense["model.layers.2"].abs().max() > 0.05, "which the dense model's own input tells from the pruned one's"
