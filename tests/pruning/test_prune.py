"""What a pruning run finds: against masks and weights by hand, on disk, whatever the batch."""

from itertools import product

import pytest
import torch
from conftest import FEW, make_model, make_model_on_disk, memory_of
from profiles import BATCH_SIZES, by_day
from random_layers import solve
from trial_helpers import changes_of, dense_masks, make_evaluator, same_state, state, unchanged, uniform

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.block_inputs import Stream
from optimum_neuronal.blocks.offload import changed_weights
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.blocks.statistics import Hessian
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.data.token_windows import TokenWindows
from optimum_neuronal.pruning import prepare as preparing
from optimum_neuronal.pruning import prune as module
from optimum_neuronal.pruning.prepare import prepare
from optimum_neuronal.pruning.prune import find_changes
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup.dsnot import DSnoTRefinement


# Those that prune by their score alone.
SCORING = [name for name in SALIENCIES.names() if not SALIENCIES.get(name).updates_weights]

SPARSEGPT = {"saliency": "sparsegpt", "topup": "uniform"}
METHODS = {
    "sparsegpt, search": {"saliency": "sparsegpt", "topup": "search", "topup_args": {"budget": 20}},
    "sparsegpt": SPARSEGPT,
    "alps": {"saliency": "alps", "saliency_args": {"iterations": 9}, "topup": "uniform"},
    "wanda, dsnot": {"topup": "dsnot"},
    "wanda, search": {"topup": "search", "topup_args": {"budget": 20}},
}


def config(sparsity=0.6, **fields):
    return NeuronALConfig(sparsity, **{"saliency": "wanda", "num_samples": 12, "num_alignment_samples": 4, **fields})


def prune(model, ids, fields):
    memory, pruner = memory_of(fields), NeuronALPruner(config(**fields))
    pruner.prune(model, ids, **memory)
    return pruner.report


def context_of(model, ids, **fields):
    return prepare(model, config(0.5, **{"topup": "uniform", **fields}), ids)


def test_changes_are_found_and_none_is_made(llama, ids):
    before, context = state(llama), context_of(llama, ids)
    outcome = find_changes(context)
    assert unchanged(llama, before)
    assert list(context.clock.seconds) == ["calibration data", "allocation", "pruning"]
    assert set(outcome.allocation.plan.sparsity.values()) == {0.5} and outcome.starved_experts == []
    assert outcome.changes.keys() == outcome.allocation.plan.sparsity.keys()
    for name, change in outcome.changes.items():
        assert (change.applied(llama.get_parameter(f"{name}.weight")) == 0).float().mean() == 0.5
    assert outcome.block_forwards == 2 * 3 + 12 * 5, "two checks; what blocks receive, and all but the last put out"


def test_a_model_computes_with_changes_for_a_while(llama, tmp_path, ids):
    on_disk, logits = make_model_on_disk(tmp_path, "llama"), []
    for model in (llama, on_disk):
        context, dense = context_of(model, ids), model(ids).logits
        changes = find_changes(context).changes
        with changed_weights(context.decoder, changes):
            logits.append(model(ids).logits)
        assert torch.equal(model(ids).logits, dense) and not torch.equal(logits[-1], dense)
    assert torch.equal(*logits)


def test_the_divergence_on_held_out_text_beside_that_of_the_score_alone(llama, ids, monkeypatch):
    held_out, warnings, expected = ids.flip(1)[:2], [], []
    windows = TokenWindows(ids, "text", held_out=held_out)
    monkeypatch.setattr(module.logger, "warning", warnings.append)
    dense = llama(held_out).logits.detach()[:, :-1].log_softmax(-1)
    alps, wanda = make_model("llama"), make_model("llama")
    found = prune(alps, windows, dict(METHODS["alps"])).divergence
    prune(wanda, ids[:4], {"topup": "uniform", "num_samples": 4})  # with the alignment sequences
    for model in (alps, wanda):
        sparse = model(held_out).logits.detach()[:, :-1].log_softmax(-1)
        expected.append(float((dense.exp() * (dense - sparse)).sum(-1).mean()))
    assert found == pytest.approx({"pruned": expected[0], "by_score": expected[1]}, rel=1e-3)
    assert len(warnings) == (expected[0] > expected[1])
    report = prune(make_model("llama"), windows, {"topup": "uniform"})
    assert "by_score" not in report.divergence and report.block_forwards == 2 * 3 + 12 * 5, "without the comparison"
    monkeypatch.setattr(module, "compare_outputs", lambda *_args: [2.0, 1.0])
    prune(make_model("llama"), windows, dict(METHODS["alps"]))
    told = "(KL divergence 2.000) than one pruned by score alone, with the same sparsity everywhere (1.000)"
    assert told in warnings[-1]


def test_a_log_names_the_steps(llama, ids, capsys):
    both = {"topup": "neuronal", "topup_args": {"steps": "both"}}
    steps = ["comparing sparsities by block", "measuring how rows deviate", "comparing sparsities by row"]
    for fields, expected in (({}, []), (both, steps)):
        find_changes(context_of(llama, ids, **fields))
        assert capsys.readouterr().err.splitlines() == [*expected, "pruning, block by block"]


@pytest.mark.usefixtures("batched")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", by_day(["llama", "mixtral", "gpt2"], "mixtral"))
def test_neither_batches_nor_a_disk_change_a_bit(family, method, ids, tmp_path):
    first, *others = [make_model(family) for _ in BATCH_SIZES]
    expected = prune(first, ids, {**METHODS[method], "batch_size": BATCH_SIZES[0]})
    assert expected.achieved_sparsity == pytest.approx(0.6, abs=2e-3)
    for model, batch_size in zip(others, BATCH_SIZES[1:]):
        prune(model, ids, {**METHODS[method], "batch_size": batch_size})
        assert unchanged(model, state(first))
    on_disk = make_model_on_disk(tmp_path, family)
    assert prune(on_disk, ids, {**METHODS[method], "max_hidden_bytes": 0}).projections == expected.projections
    assert torch.equal(on_disk(ids).logits, first(ids).logits)


def test_updated_weights_follow_the_pruned_stream(any_model, ids):
    """Block by block, by hand: every block sees the updated weights before it."""
    with inference(any_model):
        evaluator, before = make_evaluator(any_model, ids, "sparsegpt"), state(any_model)
        changes = changes_of(evaluator, uniform(evaluator, 0.6))
        assert unchanged(any_model, before)
        for index, block in enumerate(evaluator.decoder.blocks):
            runner = BlockRunner(evaluator.decoder, 12)
            inputs = runner.capture(ids)
            stream = Stream(inputs.hidden)
            for earlier, calls in zip(evaluator.decoder.blocks[: index + 1], inputs.calls):
                stream, norms = runner.replay(earlier, stream, calls, Hessian)
            for projection in block.pruned:
                name = projection.name
                expected = solve(evaluator.saliency, projection.weight.clone(), norms[name].hessian, 0.6)
                different = ((expected == 0) != (changes[name].applied(projection.weight) == 0)).sum().item()
                assert different <= 0.02 * expected.numel() + 2, "equal but for rounding, which updates amplify"
            for projection in block.pruned:
                changes[projection.name].apply_to(projection.weight)


def test_masks_by_the_dense_models_scores(any_model, ids):
    """As the paper's Algorithm 1 writes: every block's masks come from the dense model's activations."""
    with inference(any_model):
        evaluator = make_evaluator(any_model, ids)
        plan = uniform(evaluator, 0.7)
        found, usual = (changes_of(evaluator, plan, scores_dense=dense) for dense in (True, False))
        expected = dense_masks(any_model, ids, evaluator, plan)
    different = [int((expected[name] != found[name].mask.unpack()).sum()) for name in expected]
    assert max(different) <= 2, "equal but for rounding, which differs between one forward and a replay"
    assert any(not torch.equal(expected[name], usual[name].mask.unpack()) for name in expected)


def test_the_time_of_an_exchange_is_the_top_ups(llama, ids, monkeypatch):
    """The exchange of DSnoT takes 100 seconds in each of 21 projections."""
    clock, exchange = [0.0], DSnoTRefinement.exchange

    def slow(self, *args):
        clock[0] += 100
        return exchange(self, *args)

    monkeypatch.setattr(DSnoTRefinement, "exchange", slow)
    monkeypatch.setattr(preparing.time, "perf_counter", lambda: clock[0])
    seconds = prune(llama, ids, METHODS["wanda, dsnot"]).seconds
    assert seconds["allocation"] == 2100 and seconds["pruning"] == 0


# Every family and every saliency; at night each with each.
@pytest.mark.parametrize(
    ("family", "saliency"),
    by_day(product(FEW, SCORING), *product(FEW, ["wanda"]), *product(["gpt2", "mixtral"], SCORING)),
)
def test_final_masks_follow_the_pruned_stream(family, ids, saliency):
    """Every block's masks come from the activations behind the pruned blocks before it: block by block, by hand."""
    model = make_model(family)
    with inference(model):
        evaluator, before = make_evaluator(model, ids, saliency), state(model)
        plan = uniform(evaluator, 0.7)
        changes = changes_of(evaluator, plan)
        assert same_state(model, before)
        for block in evaluator.decoder.blocks:
            pruned = {p.name: p for p in block.pruned}
            for name, expected in dense_masks(model, ids, evaluator, plan, pruned).items():
                different = (expected != changes[name].mask.unpack()).sum().item()
                assert different <= 2, "equal but for rounding, which differs between one forward and a replay"
            for name, projection in pruned.items():
                changes[name].apply_to(projection.weight)
