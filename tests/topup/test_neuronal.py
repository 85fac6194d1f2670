import math
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from by_hand import by_block
from conftest import make_model
from trial_helpers import build_evaluator, make_evaluator, uniform

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.statistics import SquaredNorms
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import Decoder
from optimum_neuronal.saliency import Saliency
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.saliency.wanda import Wanda
from optimum_neuronal.topup.neuronal import BLOCK_STEP, ROW_STEP, NeuronAL, _decide, row_plan
from optimum_neuronal.topup.neuronal_variants import AuthorsNeuronAL
from optimum_neuronal.trials import PlanEvaluator
from optimum_neuronal.trials.alignment import AlignmentErrors, Deviation, Deviations


@dataclass
class FakeTrials:
    """Answers with errors of its own choice, so that decisions can be checked."""

    decoder: Decoder
    errors: dict
    saliency: Saliency = Wanda()
    norms: type[SquaredNorms] = SquaredNorms
    asked: list = field(default_factory=list)
    norms_used: set = field(default_factory=set)
    can_abandon = False

    def measure(self, measurement, plans):
        if isinstance(measurement, Deviations):
            return self.deviation
        self.asked.append((measurement.label, plans))
        self.norms_used.add(self.norms)
        return self.errors[measurement.label][: len(plans)]

    @property
    def deviation(self):
        places = {}
        for block in self.decoder.blocks:
            for projection in block.pruned:
                place = self.decoder.place_fed_by(block, projection)
                places[place.name] = torch.arange(place.features, dtype=torch.float64)
        return Deviation(self.errors.get("base"), places)


@pytest.mark.parametrize(
    "schedule, middle", [("linear", 0.5), ("exponential", (math.e**0.5 - 1) / (math.e - 1)), ("logarithmic", 0.6201)]
)
def test_schedules_by_hand(llama, schedule, middle):
    """Three blocks rise by 0, `middle` and 1 times 0.2; the mean of all three is kept."""
    decoder = find_decoder(llama)
    plan = NeuronAL(schedule=schedule).block_plan(decoder, 0.7, 0.1)
    mean = 0.2 * (0 + middle + 1) / 3
    sparsities = by_block(decoder.blocks, plan)
    assert sparsities == pytest.approx([0.7 - mean, 0.7 + 0.2 * middle - mean, 0.9 - mean], abs=1e-5)
    evaluator = FakeTrials(decoder, {BLOCK_STEP: [1.0], "base": 0.7})
    NeuronAL(steps="block", block_lambdas=(0.1,), schedule=schedule).allocate(evaluator, 0.7)
    ((_, (asked,)),) = evaluator.asked
    assert asked == plan and (asked == NeuronAL().block_plan(decoder, 0.7, 0.1)) == (schedule == "linear")


@pytest.mark.parametrize("topup", [NeuronAL(), AuthorsNeuronAL()])
def test_sparsity_rises_over_the_pruned_blocks(topup, llama):
    decoder = find_decoder(llama, ignore=[r"layers\.0\."])
    plan = topup.block_plan(decoder, 0.6, 0.1)
    assert by_block(decoder.blocks[1:], plan) == pytest.approx([0.5, 0.7])
    assert set(plan.sparsity) == set(decoder.projections)


def test_lowest_error_wins_and_the_first_of_equals(llama):
    errors = {BLOCK_STEP: [3.0, 1.0, 1.0], ROW_STEP: [0.9, 0.5], "base": 0.7}
    evaluator = FakeTrials(find_decoder(llama), errors)
    allocation = NeuronAL(block_lambdas=(0.05, 0.1, 0.2), row_lambdas=(0.0, 0.1, 0.2)).allocate(evaluator, 0.7)
    assert allocation.decisions["block"]["lambda"] == 0.1 and allocation.decisions["row"]["lambda"] == 0.2
    assert [c["error"] for c in allocation.decisions["row"]["candidates"]] == [0.7, 0.9, 0.5]
    assert [label for label, _ in evaluator.asked] == [BLOCK_STEP, ROW_STEP]
    assert allocation.plan is evaluator.asked[1][1][1]


def test_rows_that_deviate_more_are_spared(llama):
    decoder = find_decoder(llama)
    base = NeuronAL().block_plan(decoder, 0.5, 0.1)
    plan = row_plan(decoder, base, 0.2, FakeTrials(decoder, {}).deviation)
    for name, rows in plan.sparsity.items():
        assert rows[0] == pytest.approx(base.sparsity[name] + 0.2)
        assert rows[-1] == pytest.approx(base.sparsity[name] - 0.2)
        assert rows.mean().item() == pytest.approx(base.sparsity[name])


def test_row_step_everywhere(any_model, ids):
    """Every family, both references: every row of every projection takes part, the last block's down too."""
    with inference(any_model):
        for measured_on in product(["sparse-stream", "dense"], ["sequence", "pooled"]):
            evaluator = make_evaluator(any_model, ids)
            base = uniform(evaluator, 0.7)
            deviation = evaluator.measure(Deviations(*measured_on), [base])
            plan = row_plan(evaluator.decoder, base, 0.2, deviation)
            (error,) = evaluator.measure(AlignmentErrors(*measured_on), [base])
            assert deviation.error == error, "the row step's lambda 0 is the block step's winner"
            for name, rows in plan.sparsity.items():
                assert rows.max() - rows.min() > 0.3, name
                assert rows.mean().item() == pytest.approx(0.7)


def test_shapes_that_do_not_map_get_the_block_step_alone(llama):
    evaluator = FakeTrials(find_decoder(llama), {BLOCK_STEP: [1.0]})
    evaluator.decoder.config.num_attention_heads = 5
    allocation = NeuronAL(steps="both", block_lambdas=(0.1,)).allocate(evaluator, 0.7)
    assert allocation.plan == NeuronAL().block_plan(evaluator.decoder, 0.7, 0.1)
    assert "does not understand model.layers.0.self_attn.k_proj" in allocation.decisions["note"]


@pytest.mark.parametrize("reference", ["sparse-stream", "dense"])
@pytest.mark.parametrize("metric", ["cosine", "kl", "reconstruction"])
def test_every_metric_decides(metric, reference, ids, monkeypatch):
    monkeypatch.setattr(PlanEvaluator, "can_abandon", False)
    model = make_model("llama")
    lambdas = {"block_lambdas": (0.05, 0.1), "row_lambdas": (0.0, 0.1, 0.2)}
    sizes = {"topup": "neuronal", "num_samples": 6, "num_alignment_samples": 2, "seq_length": 16}
    config = NeuronALConfig(0.7, "wanda", topup_args={"metric": metric, "reference": reference, **lambdas}, **sizes)
    pruner = NeuronALPruner(config)
    pruner.prune(model, dataset=ids[:6])
    assert pruner.report.block_lambda in (0.05, 0.1) and pruner.report.row_lambda in (0.0, 0.1, 0.2)
    candidates = pruner.report.decisions["row"]["candidates"]
    assert len(candidates) == 3 and all(candidate["error"] > 0 for candidate in candidates)


def test_candidates_of_a_saliency_that_updates_weights(llama, ids, monkeypatch):
    """The default decides as for Wanda, the authors' variant solves all projections for each of four, and for the deviation."""
    solves, solve = [], ALPS.solve
    monkeypatch.setattr(ALPS, "solve", lambda self, *args: solves.append(args) or solve(self, *args))
    decisions, lambdas = {}, {"block_lambdas": (0.05, 0.2), "row_lambdas": (0.0, 0.1)}
    with inference(llama):
        for variant, calls in [(NeuronAL, 0), (AuthorsNeuronAL, 5 * 7 * 3)]:
            solves.clear()
            evaluator = build_evaluator(find_decoder(llama), ALPS(iterations=3), ids, 4)
            decisions[variant] = variant(**lambdas).allocate(evaluator, 0.6).decisions
            assert len(solves) == calls, variant
        wanda = NeuronAL(**lambdas).allocate(make_evaluator(llama, ids), 0.6)
    assert decisions[NeuronAL] == wanda.decisions


def test_a_saliency_without_rows_gets_the_block_step_alone(llama, ids):
    evaluator = make_evaluator(llama, ids, "sparsegpt")
    with inference(llama):
        both = NeuronAL(steps="both", block_lambdas=(0.1,)).allocate(evaluator, 0.7)
        row = NeuronAL(steps="row").allocate(evaluator, 0.7)
    assert both.decisions.keys() == {"block", "note"} and "no row step" in both.decisions["note"]
    assert both.plan == NeuronAL().block_plan(evaluator.decoder, 0.7, 0.1)
    assert row.decisions.keys() == {"note"} and row.plan == uniform(evaluator, 0.7)


def test_a_candidate_that_was_stopped_has_no_error():
    assert _decide("ab", (0.1, 0.2), [math.inf, 1.0])[1]["candidates"] == [
        {"lambda": 0.1, "error": None},
        {"lambda": 0.2, "error": 1.0},
    ]


def test_candidates_of_a_saliency_that_only_ranks_are_its_own(llama, ids):
    topup = NeuronAL(block_lambdas=(0.05, 0.2))
    with inference(llama):
        magnitude, wanda = (topup.allocate(make_evaluator(llama, ids, name), 0.6) for name in ("magnitude", "wanda"))
    assert magnitude.decisions != wanda.decisions
