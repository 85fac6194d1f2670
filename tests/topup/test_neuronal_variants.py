"""The variants of NeuronAL by hand: each equation as printed, each rule of the authors' code."""

from dataclasses import replace

import pytest
import torch
from by_hand import by_block, make_block
from conftest import make_model
from forward import squared_norms
from trial_helpers import dense_masks, make_evaluator, uniform

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.statistics import SquaredNorms, activation
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency.plan import Plan, mask_rows
from optimum_neuronal.saliency.scores import Wanda
from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.topup import TOPUPS, get_dist
from optimum_neuronal.topup.neuronal import BLOCK_STEP, LAMBDAS, ROW_STEP, NeuronAL
from optimum_neuronal.topup.neuronal_variants import AuthorsNeuronAL, PrintedNeuronAL, RunningNorms, row_plan, rows_of
from optimum_neuronal.trials import PlanEvaluator
from optimum_neuronal.trials.alignment import alignment_error, printed_deviation

from .test_neuronal import FakeTrials


ERRORS = {BLOCK_STEP: [1.0] * 14, ROW_STEP: [1.0] * 15, "base": 2.0}


class TestPrinted:
    def test_equation_2_by_feature(self):
        dense = torch.tensor([[1.0, 9.0, 0.0], [4.0, 4.0, 0.0]])  # shares 1/4 3/4 0 and 1/2 1/2 0
        sparse = torch.tensor([[1.0, 1.0, 4.0], [4.0, 36.0, 0.0]])  # shares 1/4 1/4 1/2 and 1/4 3/4 0
        assert printed_deviation(dense, sparse).tolist() == pytest.approx([0.25, 0.75, 0.5])

    def test_equation_3_counts_every_projection_of_the_dense_models_own_stream(self, llama, ids):
        topup = PrintedNeuronAL(steps="block", block_lambdas=[0.1, 0.2])
        with inference(llama):
            evaluator = make_evaluator(llama, ids)
            evaluator.dense()
            before = evaluator.runner.block_forwards
            candidates = topup.allocate(evaluator, 0.7).decisions["block"]["candidates"]
            assert evaluator.runner.block_forwards == before + 2 * 4 * 3, "the dense model runs once"
            projections, plan = evaluator.decoder.projections, NeuronAL().block_plan(evaluator.decoder, 0.7, 0.1)
            dense = squared_norms(llama, ids[:4], projections)
            for name, projection in projections.items():
                score = evaluator.saliency.score(projection.weight, activation(dense[name]))
                projection.weight.masked_fill_(~mask_rows(score, plan.row_counts(name, projection.shape)), 0)
            sparse = squared_norms(llama, ids[:4], projections)
        parts = {name: alignment_error(dense[name], sparse[name]).item() for name in projections}
        assert parts["model.layers.1.self_attn.q_proj"] > 0 and len(parts) == 3 * 7
        assert candidates[0]["error"] == pytest.approx(sum(parts.values()), rel=1e-4)

    def test_equation_4_rises_with_depth_unlike_with_v_as_printed(self, llama):
        decoder = find_decoder(llama)
        index, lam = torch.arange(1, 4), 0.1
        closed = [0.7 - lam + 2 * lam * (i - 1) / (3 - 1) for i in index.tolist()]
        assert by_block(decoder.blocks, NeuronAL().block_plan(decoder, 0.7, lam)) == pytest.approx(closed)
        assert get_dist(0.7, lam, index).tolist() == pytest.approx(closed[::-1]), "v_i = i, to the letter"

    def test_the_final_masks_are_those_of_the_dense_models_scores(self, llama, ids):
        """With one lambda of 0, the final pass of `printed` is Wanda on the dense model, or on the pruned blocks if asked."""
        steps = {"steps": "block", "block_lambdas": [0.0]}
        sizes = {"saliency": "wanda", "num_samples": 12, "num_alignment_samples": 4}
        with inference(llama):
            evaluator = make_evaluator(llama, ids)
            expected = dense_masks(llama, ids, evaluator, uniform(evaluator, 0.6))
        for more, share in (({}, 0.001), ({"final_scores": "sparse-stream"}, None)):
            model = make_model("llama")
            config = NeuronALConfig(0.6, topup_args={"variant": "printed", **steps, **more}, **sizes)
            NeuronALPruner(config).prune(model, ids[:12])
            different = sum(int((model.get_parameter(f"{n}.weight") != 0).ne(m).sum()) for n, m in expected.items())
            weights = sum(mask.numel() for mask in expected.values())
            assert different <= share * weights if share else different > 0.001 * weights
        with pytest.raises(ValueError, match="refit_epochs is 1, but neuronal, printed.*final_scores='sparse-stream'"):
            NeuronALConfig(0.6, topup_args={"variant": "printed"}, refit_epochs=1)

    def test_lambdas_of_the_appendix(self):
        topup = PrintedNeuronAL()
        assert len(topup.block_lambdas) == 13 and 0.04 not in topup.block_lambdas
        assert topup.row_lambdas == (0.0, *topup.block_lambdas)
        assert (topup.reference, topup.alignment_scope) == ("dense", "sequence")


class TestAuthors:
    def test_block_sparsities_move_their_mean_where_they_are_clipped(self, llama):
        decoder = find_decoder(llama)
        for sparsity, expected in [(0.7, [0.6, 0.7, 0.8]), (0.9, [0.8, 0.9, 0.99]), (0.1, [0.01, 0.1, 0.2])]:
            plan = AuthorsNeuronAL().block_plan(decoder, sparsity, 0.1)
            assert by_block(decoder.blocks, plan) == pytest.approx(expected)

    def test_the_block_step_prunes_one_weight_less_per_row(self, llama):
        evaluator = FakeTrials(find_decoder(llama), ERRORS)
        plan = AuthorsNeuronAL(steps="block", block_lambdas=[0.0]).allocate(evaluator, 0.7).plan
        for name, projection in evaluator.decoder.projections.items():
            width = projection.shape[1]
            assert set(plan.row_counts(name, projection.shape).tolist()) == {int(0.7 * width)}
        evaluator.saliency = SparseGPT()
        exact = AuthorsNeuronAL(block_lambdas=[0.1]).allocate(evaluator, 0.7).plan
        assert by_block(evaluator.decoder.blocks, exact) == pytest.approx([0.6, 0.7, 0.8]), "not rounded"

    def test_rows_by_hand(self):
        """Density 0.3, 0.4, 0.6, 0.7 of 13 weights: 3, 5, 7, 9 stay."""
        values = torch.tensor([0.0, 1.0, 3.0, 4.0], dtype=torch.float64).numpy()
        for rows, kept in [(4, [3, 5, 7, 9]), (2, [3, 5]), (8, [3, 5, 7, 9] * 2)]:
            assert (13 - 13 * rows_of((rows, 13), 0.5, 0.2, values)).tolist() == pytest.approx(kept)
        clipped = rows_of((4, 100), 0.5, 1.0, values)
        assert (100 - 100 * clipped).round().tolist() == pytest.approx([1, 1, 99, 99], abs=1), "bounds 0.01 and 0.99"

    def test_down_and_the_last_block_stay_uniform_and_q_k_v_follow_the_output_projection(self, llama):
        decoder = find_decoder(llama)
        base = Plan.uniform(decoder.projections, 0.5)
        plan = row_plan(decoder, base, 0.2, FakeTrials(decoder, ERRORS).deviation)
        for block in decoder.blocks:
            q, k, v, o, gate, up, down = (plan.sparsity[name] for name in block.pruned_names)
            assert torch.equal(q, k) and torch.equal(q, v) and torch.equal(gate, up)
            assert down.unique().numel() == 1
            spread = [rows.unique().numel() > 1 for rows in (q, o, gate)]
            assert spread == [block is not decoder.blocks[-1]] * 3

    def test_the_block_set_drops_its_largest_lambda_from_80_percent(self, llama):
        for sparsity, count in [(0.79, 14), (0.8, 13), (0.9, 13)]:
            evaluator = FakeTrials(find_decoder(llama), ERRORS)
            decisions = AuthorsNeuronAL().allocate(evaluator, sparsity).decisions
            assert [c["lambda"] for c in decisions["block"]["candidates"]] == list(LAMBDAS[:count])
            assert [c["lambda"] for c in decisions["row"]["candidates"]] == [0.0, *LAMBDAS]
            assert evaluator.norms_used == {RunningNorms}

    def test_norms_are_a_running_mean(self):
        inputs = torch.arange(36.0).view(3, 4, 3)
        own, theirs, at_once = SquaredNorms(), RunningNorms(), RunningNorms()
        at_once.update(inputs, 3)
        for norms in (own, theirs):
            norms.update(inputs[:2], 2)
            norms.update(inputs[2:], 1)
        torch.testing.assert_close(theirs.value, own.value.mean(dim=0, keepdim=True))
        assert theirs.tokens == own.tokens == 12 and torch.equal(theirs.value, at_once.value)

    def test_the_row_step_keeps_the_first_of_equal_weights(self):
        block = make_block([[3.0, 1.0, 1.0, 1.0, 0.5]])
        rows, norms = torch.tensor([0.6], dtype=torch.float64), {"block.0": SquaredNorms([torch.ones(1, 5)], 1)}
        plans = [Plan({"block.0": rows}, keeps_first=first) for first in (True, False)]
        evaluator = PlanEvaluator(runner=None, saliency=Wanda(), ids=torch.empty(0, 1), num_alignment_samples=0)
        together = evaluator.changes(block, norms, plans)
        alone = [change_of for plan in plans for change_of in evaluator.changes(block, norms, [plan])]
        for made in (together, alone):
            zeros = [(change_of(block.pruned[0]).applied(block.pruned[0].weight) == 0).tolist() for change_of in made]
            assert zeros == [[[False, False, True, True, True]], [[False, True, True, False, True]]]


def test_fields_given_one_by_one_replace_the_variants(llama):
    topup = AuthorsNeuronAL(alignment_scope="sequence", block_lambdas=(0.15,))
    assert (topup.alignment_scope, topup.block_lambdas) == ("sequence", (0.15,))
    assert topup.reference == "sparse-stream" and topup.row_lambdas == (0.0, *LAMBDAS)
    evaluator = FakeTrials(find_decoder(llama), ERRORS)
    assert topup.allocate(evaluator, 0.6).decisions["block"]["lambda"] == 0.15
    with pytest.raises(ValueError, match="variant is 'autors'.*Did you mean 'authors'"):
        TOPUPS.make("neuronal", "topup_args", {"variant": "autors"})


def test_the_default_takes_the_block_step_alone_unless_rows_are_asked_for():
    assert [NeuronAL().steps, AuthorsNeuronAL().steps, PrintedNeuronAL().steps] == ["block", "both", "both"]
    assert NeuronAL(row_lambdas=(0.1,)).steps == "both" == replace(NeuronAL(steps="both"), metric="kl").steps
    assert NeuronAL(steps="block", row_lambdas=(0.1,)).steps == "block" == replace(NeuronAL(), metric="kl").steps


@pytest.mark.parametrize("variant", [AuthorsNeuronAL, PrintedNeuronAL])
def test_every_family(variant, any_model, ids):
    """Fused projections, grouped heads and experts too. Rounding, and blocks of different sizes, move the target."""
    with inference(any_model):
        evaluator = make_evaluator(any_model, ids)
        plan = variant(block_lambdas=(0.1,), row_lambdas=(0.1,)).allocate(evaluator, 0.6).plan
        projections = evaluator.decoder.projections
        counts = {name: plan.row_counts(name, p.shape) for name, p in projections.items()}
    weights = sum(p.numel for p in projections.values())
    pruned = sum(count.sum().item() for count in counts.values())
    assert pruned / weights == pytest.approx(0.6, abs=0.04)
    assert any(count.max() > count.min() + 1 for count in counts.values())
