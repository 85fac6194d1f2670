import math

import pytest
import torch
from conftest import make_model
from forward import squared_norms, token_counts
from sweeps import build_sweep

from optimum_neuronal.decoder.finding import find_decoder
from optimum_neuronal.decoder.trial import trial_weights
from optimum_neuronal.engine.capture import capture_inputs, inference, next_token_logits
from optimum_neuronal.engine.replay import replay
from optimum_neuronal.engine.sweep import Sweep
from optimum_neuronal.metrics.statistics import Hessian, SquaredNorms, activation
from optimum_neuronal.pruning.final_pruning import FinalPruning
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.sparsity.changes import Zeros
from optimum_neuronal.sparsity.cuts import prune_rows
from optimum_neuronal.sparsity.plan import SparsityPlan, row_counts
from optimum_neuronal.topup.neuronal import NeuronAL, block_plan


# Those that prune by their score alone.
SCORING = [name for name in SALIENCIES.names() if not SALIENCIES.get(name).updates_weights]


def make_sweep(model, ids, saliency="wanda", batch_size=1):
    return build_sweep(find_decoder(model), SALIENCIES.get(saliency)(), ids, 4, batch_size)


def uniform(sweep, sparsity=0.5):
    return SparsityPlan(dict.fromkeys(sweep.decoder.projections, sparsity))


def bits_of(change):
    """What is kept: of a change that replaces the weight, its mask's."""
    return getattr(change, "mask", change).bits


def state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def unchanged(model, before):
    hooks = any(module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules())
    return not hooks and all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_dense_norms_are_the_models_own(any_model, ids):
    with inference(any_model):
        sweep = make_sweep(any_model, ids)
        ours = {name: norms.value for block in sweep.dense_norms() for name, norms in block.items()}
    for name, expected in squared_norms(any_model, ids[:4], sweep.decoder.projections).items():
        torch.testing.assert_close(ours[name], expected)


def test_dense_alignment_by_brute_force(any_model, ids):
    """Reference "dense": masks from the dense model's activations, then one forward of the whole sparse model."""
    with inference(any_model):
        sweep = make_sweep(any_model, ids)
        plan = block_plan(sweep.decoder, 0.6, 0.1)
        (error,) = sweep.alignment_errors([plan], "dense", "sequence", "l2", label=None)
        projections = sweep.decoder.projections
        dense = squared_norms(any_model, ids[:4], projections)

        def mask_of(projection):
            norms = dense[projection.name]
            score = projection.weight.abs() * norms.mean(dim=0).sqrt()
            return Zeros(prune_rows(score, row_counts(plan.sparsity[projection.name], projection.shape)))

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
        sweep = make_sweep(llama, ids)
        everything = sweep.alignment_errors([uniform(sweep)], "sparse-stream", "sequence", "l2", label=None)
        qkv = build_sweep(find_decoder(llama, targets=["[qkv]_proj"]), sweep.saliency, ids, 4)
        assert qkv.alignment_errors([uniform(qkv)], "sparse-stream", "sequence", "l2", label=None) == [0.0]
    assert everything[0] > 0


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma4_text"])
def test_plans_do_not_disturb_each_other(family, ids):
    """Not even where blocks hand keys and values to later blocks, as Gemma 4's do."""
    model = make_model(family)
    with inference(model):
        sweep = make_sweep(model, ids)
        plans = [block_plan(sweep.decoder, 0.6, lam) for lam in (0.0, 0.1, 0.2)]
        for reference in ("sparse-stream", "dense"):
            together = sweep.alignment_errors(plans, reference, "sequence", "l2", label=None)
            alone = [sweep.alignment_errors([p], reference, "sequence", "l2", label=None)[0] for p in plans]
            assert together == alone


@pytest.mark.parametrize("reference", ["dense", "sparse-stream"])
def test_output_errors_by_brute_force(any_model, ids, reference):
    """Whole forwards of the model, sequence by sequence, with the masks that the reference gives."""
    with inference(any_model):
        sweep = make_sweep(any_model, ids)
        plans = [block_plan(sweep.decoder, 0.6, lam) for lam in (0.1, 0.2)]
        found = {metric: sweep.output_errors(plans, metric, None, reference) for metric in ("kl", "nll")}
        projections = sweep.decoder.projections
        dense_logits = any_model(ids[:4]).logits.log_softmax(dim=-1)
        for number, plan in enumerate(plans):
            before = state(any_model)
            if reference == "dense":
                _prune_by_hand(any_model, plan, ids[:4], sweep, [list(projections.values())])
            else:
                _prune_by_hand(any_model, plan, ids[:4], sweep, [block.pruned for block in sweep.decoder.blocks])
            logits = any_model(ids[:4]).logits.log_softmax(dim=-1)
            any_model.load_state_dict(before)
            kl = (dense_logits.exp() * (dense_logits - logits)).sum(dim=-1)[:, :-1].mean().item()
            nll = -logits[:, :-1].gather(2, ids[:4, 1:, None]).mean().item()
            assert found["kl"][number] == pytest.approx(kl, rel=2e-2)
            assert found["nll"][number] == pytest.approx(nll, rel=1e-3)


def _prune_by_hand(model, plan, ids, sweep, groups):
    """Every group with the activations behind the groups before it."""
    for projections in groups:
        norms = squared_norms(model, ids, sweep.decoder.projections)
        for projection in projections:
            score = sweep.saliency.score(projection.weight, activation(norms[projection.name]))
            mask = prune_rows(score, plan.row_counts(projection.name, projection.shape))
            projection.weight.masked_fill_(mask, 0)


def test_dense_output_is_the_models_own(any_model, ids):
    """Whatever a head does with the last block's output: scales, caps, norms."""
    with inference(any_model):
        sweep = make_sweep(any_model, ids)
        hidden = sweep.engine.dense().output.batches
        logits = next_token_logits(sweep.decoder, ids[:1], hidden[0], sweep.engine.runner.wrap(ids), "cpu")
        torch.testing.assert_close(logits, any_model(ids[:1]).logits, rtol=1e-4, atol=1e-4)
        (error,) = sweep.output_errors([uniform(sweep, 0.0)], "kl", None)
        assert error == pytest.approx(0, abs=1e-6)


def test_plans_share_what_they_have_in_common(llama, ids):
    with inference(llama):
        sweep = make_sweep(llama, ids)
        base = uniform(sweep).sparsity
        last = {**base, sweep.decoder.blocks[-1].pruned_names[0]: 0.9}
        plans = [SparsityPlan(base), SparsityPlan(last), SparsityPlan(dict(base))]
        alone = [sweep.output_errors([plan], "kl", None)[0] for plan in plans]
        sweep.engine.runner.block_forwards = 0
        assert sweep.output_errors(plans, "kl", None) == alone
        assert sweep.engine.runner.block_forwards == 4 * (1 + 1 + 2), "they differ in the last of three blocks"


def test_dense_scores_are_those_of_all_sequences(llama, ids):
    with inference(llama):
        sweep = make_sweep(llama, ids)
        names = [block.pruned_names[0] for block in sweep.decoder.blocks]
        scores = sweep.dense_scores(lambda block, a: [a[block.pruned_names[0]].sum().item()], "Scores")
        expected = squared_norms(llama, ids, sweep.decoder.projections)
    for (score,), name in zip(scores, names):
        assert score == pytest.approx(activation(expected[name]).sum().item(), rel=1e-5)
    assert sweep.engine.runner.block_forwards == 12 * 3


@pytest.mark.parametrize("saliency", ["sparsegpt"])
def test_updated_weights_follow_the_pruned_stream(any_model, ids, saliency):
    """Block by block, by hand: every block sees the updated weights before it."""
    with inference(any_model):
        sweep = make_sweep(any_model, ids, saliency)
        plan, before = uniform(sweep, 0.6), state(any_model)
        found = FinalPruning(sweep.engine, plan).find()
        assert unchanged(any_model, before)
        for block in sweep.decoder.blocks:
            inputs = capture_inputs(sweep.decoder, ids, 12, "cpu")
            hidden = inputs.hidden
            for earlier, calls in zip(sweep.decoder.blocks, inputs.calls):
                hidden, norms = replay(earlier, hidden, calls, Hessian)
                if earlier is block:
                    break
            for projection in block.pruned:
                expected = sweep.saliency.prune(projection.weight, norms[projection.name].hessian, 0.6)
                different = ((expected == 0) != (found[projection.name].unpack() == 0)).sum().item()
                assert different <= 0.02 * expected.numel() + 2, "equal but for rounding, which updates amplify"
            for projection in block.pruned:
                found[projection.name].apply_to(projection.weight)


def test_plans_that_cannot_win_are_abandoned(llama, ids):
    with inference(llama):
        sweep = make_sweep(llama, ids)
        plans = [block_plan(sweep.decoder, 0.6, lam) for lam in (0.0, 0.1, 0.2, 0.3)]
        for reference in ("sparse-stream", "dense"):
            measured_on = (reference, "sequence", "l2")
            everything = sweep.alignment_errors(plans, *measured_on, label=None)
            low, high = min(everything), max(everything)
            assert sweep.alignment_errors(plans, *measured_on, label=None, bound=high) == everything
            bounded = sweep.alignment_errors(plans, *measured_on, label=None, bound=low)
            assert min(bounded) == low and bounded.index(low) == everything.index(low)
            assert all(error in (whole, math.inf) for error, whole in zip(bounded, everything))
            sweep.engine.runner.block_forwards = 0
            assert sweep.alignment_errors(plans, *measured_on, label=None, bound=0.0) == 4 * [math.inf]
            assert sweep.engine.runner.block_forwards <= 4 * 5, "all of them after the first block"


@pytest.mark.parametrize("scope", ["sequence", "pooled"])
def test_abandoning_does_not_change_the_decision(any_model, ids, scope, monkeypatch):
    decisions = {}
    for abandons in (True, False):
        monkeypatch.setattr(Sweep, "can_abandon", abandons)
        with inference(any_model):
            topup = NeuronAL(alignment_scope=scope, block_lambdas=(0.05, 0.1, 0.2, 0.25), row_lambdas=(0.0, 0.1, 0.3))
            allocation = topup.allocate(make_sweep(any_model, ids), 0.7)
        lambdas = {step: decision["lambda"] for step, decision in allocation.decisions.items()}
        plan = {name: torch.as_tensor(value).tolist() for name, value in allocation.plan.sparsity.items()}
        decisions[abandons] = lambdas, plan
    assert decisions[True] == decisions[False]


def test_shared_work_is_done_once(llama, ids):
    """Candidates share the dense run of the first block; with the dense reference, of every block."""
    with inference(llama):
        sweep = make_sweep(llama, ids)
        plans = [block_plan(sweep.decoder, 0.6, lam) for lam in (0.0, 0.1, 0.2)]
        sweep.alignment_errors(plans, "sparse-stream", "sequence", "l2", label=None)
        assert sweep.engine.runner.block_forwards == 4 * (1 + 3 + 2 * 6)
        sweep.engine.runner.block_forwards = 0
        sweep.alignment_errors(plans, "dense", "sequence", "l2", label=None)
        assert sweep.engine.runner.block_forwards == 4 * (3 + 9), "once dense, then every plan"


@pytest.mark.parametrize("saliency", SCORING)
def test_final_masks_follow_the_pruned_stream(any_model, ids, saliency):
    """Every block's masks come from the activations behind the pruned blocks before it: block by block, by hand."""
    with inference(any_model):
        sweep = make_sweep(any_model, ids, saliency)
        plan = uniform(sweep, 0.7)
        before = state(any_model)
        masks = {name: ~kept.unpack() for name, kept in FinalPruning(sweep.engine, plan).find().items()}
        assert unchanged(any_model, before)
        for block in sweep.decoder.blocks:
            norms = squared_norms(any_model, ids, block.projections)
            for projection in block.pruned:
                score = sweep.saliency.score(projection.weight, activation(norms[projection.name]))
                expected = prune_rows(score, plan.row_counts(projection.name, projection.shape))
                different = (expected != masks[projection.name]).sum().item()
                assert different <= 2, "equal but for rounding, which differs between one forward and a replay"
            for projection in block.pruned:
                projection.weight.masked_fill_(masks[projection.name], 0)


@pytest.mark.parametrize("saliency", SALIENCIES.names())
def test_batch_size_does_not_change_a_bit(any_model, ids, saliency):
    results = []
    for batch_size in (1, 5, 12):
        with inference(any_model):
            sweep = make_sweep(any_model, ids, saliency, batch_size)
            plan = block_plan(sweep.decoder, 0.7, 0.1)
            errors = sweep.alignment_errors([plan], "sparse-stream", "sequence", "l2", label=None)
            results.append(
                (errors, {name: bits_of(mask) for name, mask in FinalPruning(sweep.engine, plan).find().items()})
            )
    for errors, masks in results[1:]:
        assert errors == pytest.approx(results[0][0], rel=1e-6)
        assert all(torch.equal(bits, results[0][1][name]) for name, bits in masks.items())


def test_refine_edits_masks(llama, ids):
    with inference(llama):
        sweep = make_sweep(llama, ids)
        seen = []

        def refine(projection, mask, score, statistic):
            seen.append((projection.name, statistic.value.shape[1:], score.shape == mask.shape))
            return torch.zeros_like(mask)

        masks = FinalPruning(sweep.engine, uniform(sweep), refine).find()
    assert [name for name, *_ in seen] == list(sweep.decoder.projections)
    assert all(mask.unpack().all() for mask in masks.values())
    assert seen[-1][1:] == ((48,), True), "down's inputs"


def test_magnitude_needs_no_forward(llama):
    with inference(llama):
        sweep = make_sweep(llama, torch.empty(0, 0, dtype=torch.int64), "magnitude")
        masks = FinalPruning(sweep.engine, uniform(sweep)).find()
    assert sweep.engine.runner.block_forwards == 0
    assert all((~mask.unpack()).float().mean() == pytest.approx(0.5, abs=0.01) for mask in masks.values())


class Interrupt(SALIENCIES.get("wanda")):
    """Raises at its n-th score."""

    countdown = 0

    def score(self, weight, activations):
        type(self).countdown -= 1
        if type(self).countdown == 0:
            raise KeyboardInterrupt
        return super().score(weight, activations)


@pytest.mark.parametrize("moment", [1, 5, 12, 20, 33, 41])
@pytest.mark.parametrize("work", ["alignment_errors", "deviation", "final_masks"])
def test_an_interrupt_restores_weights_and_hooks(llama, ids, moment, work):
    before = state(llama)
    Interrupt.countdown = moment
    with pytest.raises(KeyboardInterrupt), inference(llama):
        sweep = build_sweep(find_decoder(llama), Interrupt(), ids, 4)
        measured_on = {"reference": "sparse-stream", "scope": "sequence", "metric": "l2", "label": None}
        while True:
            if work == "alignment_errors":
                sweep.alignment_errors([uniform(sweep)], **measured_on)
            elif work == "deviation":
                sweep.deviation(uniform(sweep), **measured_on)
            else:
                FinalPruning(sweep.engine, uniform(sweep)).find()
    assert unchanged(llama, before)


def test_activations_that_are_not_finite_are_refused(ids):
    model = make_model("llama")
    with inference(model):
        make_sweep(model, ids).engine.check_replay()
        model.model.embed_tokens.weight.data[:] = float("inf")
        with pytest.raises(ValueError, match="NaN or infinity on the first calibration sequence.*float32"):
            make_sweep(model, ids).engine.check_replay()
        with pytest.raises(ValueError, match=r"The saliency of model\.layers\.0\.self_attn\.q_proj is not finite"):
            sweep = make_sweep(model, ids)
            FinalPruning(sweep.engine, uniform(sweep)).find()
        with pytest.raises(ValueError, match=r"Activations in model\.layers\.0 are not finite"):
            sweep = make_sweep(model, ids)
            sweep.alignment_errors([uniform(sweep)], "dense", "sequence", "l2", label=None)


def test_squared_norms_of_an_alignment_set_are_the_first_sequences(llama, ids):
    with inference(llama):
        norms = make_sweep(llama, ids).dense_norms()[0]["model.layers.0.self_attn.q_proj"]
    assert isinstance(norms, SquaredNorms) and norms.value.shape == (4, 32)
