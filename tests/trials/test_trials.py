from itertools import product

import pytest
import torch
from conftest import FEW, make_model
from forward import squared_norms
from profiles import BATCH_SIZES, by_day
from trial_helpers import build_trials, make_trials, state, unchanged, uniform

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.blocks.statistics import Hessian, SquaredNorms, activation
from optimum_neuronal.files.records import Records
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.final_pass import FinalPruning
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.plan import mask_rows
from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.saliency.wanda import Wanda
from optimum_neuronal.topup.neuronal import NeuronAL, block_plan
from optimum_neuronal.trials import Trials


@pytest.mark.parametrize("family", by_day(FEW, "gpt2", "llama4_text", "mixtral"))
def test_abandoning_does_not_change_the_decision(family, ids, monkeypatch):
    lambdas = {"block_lambdas": (0.05, 0.1, 0.2, 0.25), "row_lambdas": (0.0, 0.1, 0.3)}
    model = make_model(family)
    for scope in ["sequence", "pooled"]:
        decisions = []
        for abandons in (True, False):
            monkeypatch.setattr(Trials, "can_abandon", abandons)
            with inference(model):
                allocation = NeuronAL(alignment_scope=scope, **lambdas).allocate(make_trials(model, ids), 0.7)
            chosen = {step: decision["lambda"] for step, decision in allocation.decisions.items()}
            plan = {name: torch.as_tensor(value).tolist() for name, value in allocation.plan.sparsity.items()}
            decisions.append((chosen, plan))
        assert decisions[0] == decisions[1]


# Every family and every saliency; at night each with each.
@pytest.mark.parametrize(
    ("family", "saliency"),
    by_day(
        product(FEW, SALIENCIES.names()),
        *product(FEW, ["wanda", "sparsegpt"]),
        *product(["gpt2", "mixtral"], SALIENCIES.names()),
    ),
)
def test_batch_size_does_not_change_a_bit(family, ids, saliency):
    model, results = make_model(family), []
    for batch_size in BATCH_SIZES:
        with inference(model):
            trials = make_trials(model, ids, saliency, batch_size)
            plan = block_plan(trials.decoder, 0.7, 0.1)
            errors = trials.alignment_errors([plan], "sparse-stream", "sequence", "l2", label=None)
            weights = trials.decoder.projections
            found = FinalPruning(trials, plan).find()[0]
            results.append((errors, {name: change.applied(weights[name].weight) for name, change in found.items()}))
    for errors, sparse in results[1:]:
        assert errors == pytest.approx(results[0][0], rel=1e-6)
        assert all(torch.equal(weight, results[0][1][name]) for name, weight in sparse.items())


def test_blocks_without_pruned_projections_have_no_scores(llama, ids):
    with inference(llama):
        trials = make_trials(llama, ids, ignore=[r"layers\.1\."])
        assert trials.dense_scores(lambda block, _: block.name, "Names") == ["model.layers.0", "model.layers.2"]


class Interrupt(SALIENCIES.get("wanda")):
    """Raises at its n-th score."""

    countdown = 0

    def score(self, weight, activations):
        type(self).countdown -= 1
        if type(self).countdown == 0:
            raise KeyboardInterrupt
        return super().score(weight, activations)


def test_an_interrupt_restores_weights_and_hooks(llama, ids):
    measured_on, before = (
        {"reference": "sparse-stream", "scope": "sequence", "metric": "l2", "label": None},
        state(llama),
    )
    for work in [
        lambda trials: trials.alignment_errors([uniform(trials)], **measured_on),
        lambda trials: trials.deviation(uniform(trials), **measured_on),
        lambda trials: FinalPruning(trials, uniform(trials)).find(),
    ]:
        for moment in [1, 5, 12, 20, 33, 41]:
            Interrupt.countdown = moment
            with pytest.raises(KeyboardInterrupt), inference(llama):
                trials = build_trials(find_decoder(llama), Interrupt(), ids, 4)
                while True:
                    work(trials)
            assert unchanged(llama, before)


def test_activations_that_are_not_finite_raise(ids):
    model = make_model("llama")
    with inference(model):
        make_trials(model, ids).runner.check_replay(ids[:1])
        model.model.embed_tokens.weight.data[:] = float("inf")
        with pytest.raises(ValueError, match="NaN or infinity on the first calibration sequence.*float32"):
            make_trials(model, ids).runner.check_replay(ids[:1])
        with pytest.raises(ValueError, match=r"The saliency of model\.layers\.0\.self_attn\.q_proj is not finite"):
            trials = make_trials(model, ids)
            FinalPruning(trials, uniform(trials)).find()[0]
        with pytest.raises(ValueError, match=r"Activations in model\.layers\.0 are not finite"):
            trials = make_trials(model, ids)
            trials.alignment_errors([uniform(trials)], "dense", "sequence", "l2", label=None)
        with pytest.raises(ValueError, match=r"The saliency of model\.layers\.0\.self_attn\.q_proj is not finite"):
            make_trials(model, ids).dense_scores(lambda *_: None, "Scores")


def test_rows_matter_as_much_as_their_weights_on_the_plans_own_stream(trials, llama, ids):
    """A plan that prunes nothing has the dense model's stream; with another, later blocks receive something else.
    Where the plan's stream has been run, it costs nothing."""
    projections = trials.decoder.projections
    dense = squared_norms(llama, ids[:4], projections)
    plans = [uniform(trials, share) for share in (0.0, 0.6)]
    untouched, pruned = (trials.row_saliency(plan, None) for plan in plans)
    trials.stream_of(plans[0])
    before = trials.runner.block_forwards
    trials.row_saliency(plans[0], None)
    assert trials.runner.block_forwards == before
    assert list(untouched) == list(pruned) == list(projections)
    for name, projection in projections.items():
        expected = (projection.weight.abs() * activation(dense[name])).double().sum(dim=1)
        torch.testing.assert_close(untouched[name], expected, rtol=1e-4, atol=1e-4)
        first = name.startswith("model.layers.0.")
        assert torch.allclose(pruned[name], expected, rtol=1e-4) == first, name


def test_each_statistic_of_the_dense_model_is_cached_by_itself(llama, ids):
    trials = make_trials(llama, ids)
    with inference(llama):
        for kind in (SquaredNorms, Hessian, SquaredNorms):
            assert {type(norm) for norms in trials.dense(kind)[0] for norm in norms.values()} == {kind}


def test_a_plans_own_stream_is_pruned_by_score_alone(llama, ids, monkeypatch):
    trials = build_trials(find_decoder(llama), SparseGPT(), ids, 4)
    monkeypatch.setattr(SparseGPT, "prune", lambda *_args, **_named: 1 / 0)
    with inference(llama):
        assert len(trials.stream_of(uniform(trials))[0]) == len(trials.decoder.blocks)


def test_candidates_prune_starved_experts_by_magnitude(ids):
    """As the final pass does; here all experts are starved."""
    model = make_model("mixtral")
    with inference(model):
        trials = build_trials(find_decoder(model), Wanda(), ids, 4, min_expert_tokens=10**6)
        plan, block = uniform(trials), trials.decoder.blocks[0]
        (change_of,) = trials.changes(block, trials.dense()[0][0], [plan])
        for p in (p for p in block.pruned if p.expert is not None):
            assert torch.equal(change_of(p).mask, mask_rows(p.weight.abs(), plan.row_counts(p.name, p.shape)))


def test_every_plan_and_question_has_a_record_of_its_own(llama, ids, tmp_path):
    trials = build_trials(find_decoder(llama), Wanda(), ids, 4, records=Records(tmp_path))
    asked = [([uniform(trials, sparsity)], (question,)) for sparsity in (0.5, 0.6) for question in ("l2", "kl")]
    for _ in range(2):
        found = [trials.measured(*one, lambda number=number: (number, {}))[0] for number, one in enumerate(asked)]
        assert found == [0, 1, 2, 3]
