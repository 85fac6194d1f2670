"""The variants of NeuronAL by hand: each equation as printed, each rule of the authors' code."""

from dataclasses import replace

import pytest
import torch
from by_hand import by_block, make_block
from conftest import make_model
from trial_helpers import dense_masks, make_evaluator, uniform

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.statistics import SquaredNorms
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency.plan import Plan, row_counts
from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.saliency.wanda import Wanda
from optimum_neuronal.topup import TOPUPS
from optimum_neuronal.topup.neuronal import BLOCK_STEP, LAMBDAS, ROW_STEP, NeuronAL
from optimum_neuronal.topup.neuronal_variants import AuthorsNeuronAL, PrintedNeuronAL, RunningNorms, rows_of
from optimum_neuronal.trials import PlanEvaluator

from .test_neuronal import FakeTrials


ERRORS = {BLOCK_STEP: [1.0] * 14, ROW_STEP: [1.0] * 15, "base": 2.0}


class TestPrinted:
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
    def test_the_block_step_prunes_one_weight_less_per_row(self, llama):
        evaluator = FakeTrials(find_decoder(llama), ERRORS)
        plan = AuthorsNeuronAL(steps="block", block_lambdas=[0.0]).allocate(evaluator, 0.7).plan
        for name, projection in evaluator.decoder.projections.items():
            width = projection.shape[1]
            assert set(row_counts(plan.sparsity[name], projection.shape).tolist()) == {int(0.7 * width)}
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
        counts = {name: row_counts(plan.sparsity[name], p.shape) for name, p in projections.items()}
    weights = sum(p.numel for p in projections.values())
    pruned = sum(count.sum().item() for count in counts.values())
    assert pruned / weights == pytest.approx(0.6, abs=0.04)
    assert any(count.max() > count.min() + 1 for count in counts.values())
