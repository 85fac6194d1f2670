import math

import pytest
from conftest import make_model
from forward import squared_norms, token_counts
from sweeps import build_sweep, make_sweep, uniform

from optimum_neuronal.engine.capture import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.trial import trial_weights
from optimum_neuronal.sparsity.masks import Zeros, mask_rows
from optimum_neuronal.sparsity.plan import row_counts
from optimum_neuronal.topup.neuronal import block_plan


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
