from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from by_hand import make_block
from conftest import FEW, make_model
from forward import squared_norms
from profiles import BATCH_SIZES, by_day
from trial_helpers import build_evaluator, changes_of, dense_masks, make_evaluator, state, unchanged, uniform

from optimum_neuronal.blocks.statistics import Hessian, SquaredNorms, activation
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.files.records import Records
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.plan import ColumnPattern, Plan, mask_rows, row_counts
from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.saliency.wanda import Wanda
from optimum_neuronal.topup.neuronal import NeuronAL
from optimum_neuronal.trials import Cache, PlanEvaluator
from optimum_neuronal.trials import plan_evaluator as module
from optimum_neuronal.trials.alignment import AlignmentErrors, Deviations
from optimum_neuronal.trials.plan_evaluator import Measurement
from optimum_neuronal.trials.scores import BlockScores, RowSaliency


class TestChanges:
    """The zeros of candidates, for weights 3 1 and 1 -2 with activations 1 2, so saliencies 3 2 and 1 4."""

    NORMS = {"block.0": SquaredNorms([torch.tensor([[1.0, 4.0]])], tokens=3)}
    ONE_OF_TWO = [[[True, False], [False, True]]]

    def masks(self, *sparsities, pattern=None):
        block = make_block([[3, 1], [1, -2]])
        evaluator = build_evaluator(SimpleNamespace(blocks=[block]), Wanda(), torch.zeros(1, 1), 1, pattern=pattern)
        changes = evaluator.changes(block, self.NORMS, [Plan({"block.0": sparsity}) for sparsity in sparsities])
        return [change_of(block.pruned[0]).mask.tolist() for change_of in changes]

    def test_plans_cut_every_row_from_one_ranking(self, monkeypatch):
        ranked, sort_rows = [], module.sort_rows
        monkeypatch.setattr(module, "sort_rows", lambda score: ranked.append(1) or sort_rows(score))
        masks = self.masks(0.5, 0.0, torch.tensor([1.0, 0.0], dtype=torch.float64))
        assert masks == [*self.ONE_OF_TWO, [[True, True], [True, True]], [[False, False], [True, True]]]
        assert len(ranked) == 1

    def test_a_pattern_decides_instead_of_the_plan(self):
        assert self.masks(0.0, 0.9, pattern=ColumnPattern(1, 2)) == 2 * self.ONE_OF_TWO


@pytest.mark.parametrize("family", by_day(FEW, "gpt2", "llama4_text", "mixtral"))
@pytest.mark.parametrize("scope", ["sequence", "pooled"])
def test_abandoning_does_not_change_the_decision(scope, family, ids, monkeypatch):
    lambdas = {"block_lambdas": (0.05, 0.1, 0.2, 0.25), "row_lambdas": (0.0, 0.1, 0.3)}
    model, allocations = make_model(family), []
    for abandons in (True, False):
        monkeypatch.setattr(PlanEvaluator, "can_abandon", abandons)
        with inference(model):
            allocations.append(NeuronAL(alignment_scope=scope, **lambdas).allocate(make_evaluator(model, ids), 0.7))
    first, second = allocations
    assert first.plan.key() == second.plan.key()
    assert all(first.decisions[step]["lambda"] == second.decisions[step]["lambda"] for step in ("block", "row"))


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
            evaluator = make_evaluator(model, ids, saliency, batch_size)
            plan = NeuronAL().block_plan(evaluator.decoder, 0.7, 0.1)
            errors = evaluator.measure(AlignmentErrors("sparse-stream"), [plan])
            changes = changes_of(evaluator, plan)
            weights = {name: changes[name].applied(p.weight) for name, p in evaluator.decoder.projections.items()}
            results.append((errors, weights))
    for errors, weights in results[1:]:
        assert errors == pytest.approx(results[0][0], rel=1e-6)
        assert all(torch.equal(weight, results[0][1][name]) for name, weight in weights.items())


def test_projections_with_the_same_input_are_solved_together(llama, ids, monkeypatch):
    """As in the final pass, where that changes no bit."""
    assert SparseGPT.solves_alike
    together, solve, errors = [], SparseGPT.solve, []
    monkeypatch.setattr(SparseGPT, "solve", lambda self, *args: together.append(len(args[0])) or solve(self, *args))
    for alike in (True, False):
        monkeypatch.setattr(SparseGPT, "solves_alike", alike)
        with inference(llama):
            evaluator = make_evaluator(llama, ids, "sparsegpt")
            errors.append(evaluator.measure(AlignmentErrors("sparse-stream"), [uniform(evaluator, 0.6)]))
    assert together == 3 * [3, 1, 2, 1] + 3 * 7 * [1]
    assert errors[0] == errors[1]


@pytest.mark.parametrize("saliency", ["wanda", "sparsegpt"])
def test_a_plans_own_stream_runs_through_sparse_blocks(llama, ids, saliency):
    """By hand, one block after the other. Weights that would be updated are pruned by their score alone."""
    with inference(llama):
        evaluator, before = make_evaluator(llama, ids, saliency), state(llama)
        plan = uniform(evaluator, 0.6)
        per_block, output = evaluator.stream_of(plan)
        assert unchanged(llama, before)
        for block, norms in zip(evaluator.decoder.blocks, per_block):
            pruned = {p.name: p for p in block.pruned}
            expected = squared_norms(llama, ids[:4], pruned)
            for name, mask in dense_masks(llama, ids[:4], evaluator, plan, pruned).items():
                torch.testing.assert_close(norms[name].value, expected[name], rtol=1e-4, atol=1e-4)
                pruned[name].weight.masked_fill_(~mask, 0)
        expected = llama.model(ids[:4]).last_hidden_state
        torch.testing.assert_close(llama.model.norm(torch.cat(list(output))), expected, rtol=1e-4, atol=1e-4)


def test_blocks_without_pruned_projections_have_no_scores(llama, ids):
    with inference(llama):
        evaluator = make_evaluator(llama, ids, ignore=[r"layers\.1\."])
        names = evaluator.measure_once(BlockScores("names", lambda block, _: block.name))
    assert names == ["model.layers.0", "model.layers.2"]


class Interrupt(Wanda):
    """Raises at its n-th score."""

    countdown = 0

    def score(self, weight, activation):
        type(self).countdown -= 1
        if type(self).countdown == 0:
            raise KeyboardInterrupt
        return super().score(weight, activation)


@pytest.mark.parametrize(
    "work",
    [
        lambda evaluator: evaluator.measure(AlignmentErrors("sparse-stream"), [uniform(evaluator)]),
        lambda evaluator: evaluator.measure(Deviations("sparse-stream"), [uniform(evaluator)]),
        lambda evaluator: changes_of(evaluator, uniform(evaluator)),
    ],
)
def test_an_interrupt_restores_weights_and_hooks(work, llama, ids):
    before = state(llama)
    for moment in [1, 5, 12, 20, 33, 41]:
        Interrupt.countdown = moment
        with pytest.raises(KeyboardInterrupt), inference(llama):
            evaluator = build_evaluator(find_decoder(llama), Interrupt(), ids, 4)
            while True:
                work(evaluator)
        assert unchanged(llama, before)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda own: own.runner.check_replay(own.ids[:1]), "infinity on the first calibration sequence.*float32"),
        (lambda own: changes_of(own, uniform(own)), r"saliency of .*\.0\.self_attn\.q_proj is not fin"),
        (
            lambda own: own.measure(AlignmentErrors("dense"), [uniform(own)]),
            r"Activations in model\.layers\.0 are not f",
        ),
        (lambda own: own.measure(BlockScores("", lambda *_: 0)), r"saliency of .*q_proj is not finite"),
    ],
)
def test_activations_that_are_not_finite_raise(work, message, llama, ids):
    llama.model.embed_tokens.weight.data[:] = float("inf")
    with inference(llama), pytest.raises(ValueError, match=message):
        work(make_evaluator(llama, ids))


def test_rows_matter_as_much_as_their_weights_on_the_plans_own_stream(evaluator, llama, ids):
    """A plan that prunes nothing has the dense model's stream; with another, later blocks receive something else."""
    projections, plans = evaluator.decoder.projections, [uniform(evaluator, share) for share in (0.0, 0.6)]
    dense = squared_norms(llama, ids[:4], projections)
    untouched, pruned = (evaluator.measure(RowSaliency(), [plan]) for plan in plans)
    assert list(untouched) == list(pruned) == list(projections)
    for name, projection in projections.items():
        expected = (projection.weight.abs() * activation(dense[name])).double().sum(dim=1)
        torch.testing.assert_close(untouched[name], expected, rtol=1e-4, atol=1e-4)
        first = name.startswith("model.layers.0.")
        assert torch.allclose(pruned[name], expected, rtol=1e-4) == first, name
    before = evaluator.runner.block_forwards
    evaluator.measure(RowSaliency(), plans[1:])
    assert evaluator.runner.block_forwards == before, "the latest plan's stream is cached"


def test_each_statistic_of_the_dense_model_is_cached_by_itself(evaluator):
    for kind in (SquaredNorms, Hessian, SquaredNorms):
        assert {type(norm) for norms in evaluator.dense(kind)[0] for norm in norms.values()} == {kind}


def test_candidates_prune_starved_experts_by_magnitude(ids):
    """As the final pass does. Here all experts are starved."""
    model = make_model("mixtral")
    with inference(model):
        evaluator = build_evaluator(find_decoder(model), Wanda(), ids, 4, min_expert_tokens=10**6)
        plan, block = uniform(evaluator), evaluator.decoder.blocks[0]
        (change_of,) = evaluator.changes(block, evaluator.dense()[0][0], [plan])
        for p in (p for p in block.pruned if p.expert is not None):
            assert torch.equal(
                change_of(p).mask, mask_rows(p.weight.abs(), row_counts(plan.sparsity[p.name], p.shape))
            )


ROWS = torch.tensor([0.25, 0.75], dtype=torch.float64)
HALF = Plan({"q": 0.5, "k": ROWS})


@dataclass(frozen=True)
class Counted(Measurement):
    """Answers with how often it was measured."""

    metric: str = "kl"
    label: str | None = field(default=None, compare=False)
    measured: list = field(default_factory=list, compare=False)

    def measure(self, evaluator, plans):
        self.measured.append(plans)
        return [len(self.measured)], {"count": torch.tensor([float(len(self.measured))])}

    def result(self, value, tensors):
        assert tensors["count"].tolist() == value
        return value


@dataclass(frozen=True)
class Another(Counted):
    pass


def trials_of(records=None, cache=None) -> PlanEvaluator:
    return PlanEvaluator(
        runner=None,
        saliency=Wanda(),
        ids=torch.zeros(4, 4),
        num_alignment_samples=2,
        records=records or Records(),
        cache=cache or Cache(),
    )


def test_a_recorded_answer_is_looked_up_and_without_records_it_is_measured_again(tmp_path):
    unrecorded, measurement = Counted(), Counted(label="shown")
    assert [trials_of().measure(unrecorded, [HALF]) for _ in range(2)] == [[1], [2]]
    trials_of(Records(tmp_path)).measure(measurement, [HALF])
    again = Counted(label="another label", measured=measurement.measured)
    assert trials_of(Records(tmp_path)).measure(again, [Plan(dict(HALF.sparsity))]) == [1] and len(again.measured) == 1


@pytest.mark.parametrize(
    ("measurement", "plans"),
    [
        (Counted("nll"), [HALF]),
        (Another(), [HALF]),
        (Counted(), [HALF, HALF]),
        (Counted(), [Plan({**HALF.sparsity, "q": 0.5000001})]),
        (Counted(), [Plan({**HALF.sparsity, "k": ROWS.flip(0)})]),
        (Counted(), [Plan({"v": 0.5, "k": ROWS})]),
    ],
)
def test_another_question_or_plan_has_a_record_of_its_own(measurement, plans, tmp_path):
    evaluator = trials_of(Records(tmp_path))
    evaluator.measure(Counted(), [HALF])
    evaluator.measure(measurement, plans)
    evaluator.measure(measurement, plans)
    assert len(measurement.measured) == 1


def test_what_the_dense_model_answers_is_shared_by_prunes_with_one_cache():
    measurement, cache = Counted(), Cache(lasting=True)
    for evaluator in (trials_of(cache=cache), trials_of(cache=cache)):
        assert evaluator.measure_once(measurement) == [1]
        cache.release()
    assert trials_of().measure_once(measurement) == [2]
