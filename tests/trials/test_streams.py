import pytest
import torch
from forward import squared_norms
from trial_helpers import make_trials, state, unchanged, uniform

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.blocks.statistics import activation
from optimum_neuronal.files.records import Records
from optimum_neuronal.saliency.plan import Plan, mask_rows
from optimum_neuronal.saliency.wanda import Wanda
from optimum_neuronal.trials import Trials


def test_dense_output_is_the_models_own(any_model, ids):
    """Whatever a head does with the last block's output: scales, caps, norms."""
    with inference(any_model):
        trials = make_trials(any_model, ids)
        (hidden,) = trials.dense()[1].batches
        logits = trials.runner.logits(ids[:4], hidden)
        torch.testing.assert_close(logits, any_model(ids[:4]).logits, rtol=1e-4, atol=1e-4)
        (error,) = trials.output_errors([uniform(trials, 0.0)], "kl", None)
        assert error == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("saliency", ["wanda", "sparsegpt"])
def test_dense_blocks_receive_what_sparse_blocks_before_them_put_out(llama, ids, saliency):
    """By hand, one block after the other: weights that would be updated are pruned by their score alone."""
    with inference(llama):
        trials = make_trials(llama, ids, saliency)
        plan, before = uniform(trials, 0.6), state(llama)
        per_block, output = trials.stream_of(plan)
        assert unchanged(llama, before)
        for block, found in zip(trials.decoder.blocks, per_block):
            norms = squared_norms(llama, ids[:4], block.projections)
            for projection in block.pruned:
                torch.testing.assert_close(found[projection.name].value, norms[projection.name], rtol=1e-4, atol=1e-4)
                score = trials.saliency.score(projection.weight, activation(found[projection.name].value))
                mask = mask_rows(score, plan.row_counts(projection.name, projection.shape))
                projection.weight.masked_fill_(~mask, 0)
        expected = llama.model(ids[:4]).last_hidden_state
        torch.testing.assert_close(llama.model.norm(torch.cat(list(output))), expected, rtol=1e-4, atol=1e-4)


HALF = Plan({"q": 0.5, "k": torch.tensor([0.25, 0.75], dtype=torch.float64)})


class Measure:
    """Finds its number of calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return [self.calls], {"found": torch.tensor([float(self.calls)])}


def engine_of(records):
    return Trials(None, Wanda(), torch.zeros(4, 4), 2, records=records)


def test_a_recorded_step_is_looked_up_and_another_question_is_another_step(tmp_path):
    unrecorded, measure = Measure(), Measure()
    engine = engine_of(Records())
    assert [engine.measured([HALF], ("kl",), unrecorded)[0] for _ in range(2)] == [[1], [2]]
    engine_of(Records(tmp_path)).measured([HALF], ("kl",), measure)
    engine = engine_of(Records(tmp_path))
    value, tensors = engine.measured([Plan(dict(HALF.sparsity))], ("kl",), measure)
    assert value == [1] and tensors["found"].tolist() == [1] and measure.calls == 1
    other_rows = torch.tensor([0.75, 0.25], dtype=torch.float64)
    for plans, question in (
        ([HALF], ("nll",)),
        ([HALF, HALF], ("kl",)),
        ([Plan({**HALF.sparsity, "q": 0.5000001})], ("kl",)),
        ([Plan({**HALF.sparsity, "k": other_rows})], ("kl",)),
        ([Plan({"v": 0.5, "k": HALF.sparsity["k"]})], ("kl",)),
    ):
        before = measure.calls
        assert engine.measured(plans, question, measure)[0] == [before + 1]
