import pytest
import torch
from by_hand import FakeTrials, make_block
from trial_helpers import make_evaluator

from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.topup.dlp import DLP, median_metric
from optimum_neuronal.topup.owl import OWL, AuthorsOWL, outlier_ratio


def test_outliers_by_hand():
    """Metrics 1 1 2, 1 1 18 (weight -9, activation 2) and 4: their mean is 4, so 18 exceeds 4 times it, 4 just not."""
    block = make_block([[1, 1, 1], [1, 1, -9]], [[4.0]])
    activations = {"block.0": torch.tensor([1.0, 1.0, 2.0]), "block.1": torch.tensor([1.0])}
    assert outlier_ratio(block, activations, 4) == 1 / 7
    assert outlier_ratio(block, activations, 1) == 1 / 7, "4 is not above the mean"
    assert outlier_ratio(block, activations, 0.99) == 2 / 7
    assert outlier_ratio(block, activations, 5) == 0


def test_blocks_with_more_outliers_are_spared():
    """Ratios 1/8, 0 and 1/16: sparsities in a window of 0.16, from the most outliers to the fewest."""
    rows = torch.ones(3, 1, 16)
    rows[0, 0, :2], rows[2, 0, 0] = 100, 100
    blocks = [make_block(row, name=f"b{index}") for index, row in enumerate(rows)]
    evaluator = FakeTrials(blocks, activations={f"b{index}.0": torch.ones(16) for index in range(3)})
    allocation = OWL().allocate(evaluator, 0.7)
    assert allocation.decisions == {"owl": {"outlier_ratios": [2 / 16, 0.0, 1 / 16]}}
    assert list(allocation.plan.sparsity.values()) == pytest.approx([0.62, 0.78, 0.7])
    # The authors' code: 0.2, 1.2, which becomes 0.99, and 0.7, of which `int(16 s)` weights of a row are pruned.
    theirs = AuthorsOWL(half_width=0.5).allocate(evaluator, 0.7).plan
    assert list(theirs.sparsity.values()) == [3 / 16, 15 / 16, 11 / 16]
    evaluator.saliency = SparseGPT()  # which prunes a weight as a whole
    theirs = AuthorsOWL(half_width=0.5).allocate(evaluator, 0.7).plan
    assert list(theirs.sparsity.values()) == pytest.approx([0.2, 0.99, 0.7])


def test_the_metric_is_wandas_whatever_the_saliency(llama, ids):
    plans = []
    with inference(llama):
        for saliency in ("magnitude", "wanda"):
            evaluator = make_evaluator(llama, ids, saliency)
            plans.append(OWL(outlier_factor=2.0).allocate(evaluator, 0.7).plan.sparsity)
            assert evaluator.runner.block_forwards == len(ids) * 3, "one pass over the calibration set"
    assert plans[0] == plans[1] and len(set(plans[0].values())) == 3


def test_median_by_hand():
    """Metrics 1 2 6 of one projection, 4 10 of the other: the median is 4; without 10 it is the lower of 2 and 4."""
    activations = {"block.0": torch.tensor([1.0, 2.0, 2.0]), "block.1": torch.tensor([1.0, 2.0])}
    assert median_metric(make_block([[1, -1, 3]], [[4, 5]]), activations) == 4
    activations["block.1"] = torch.tensor([1.0])
    assert median_metric(make_block([[1, -1, 3]], [[-4.0]]), activations) == 2


def test_blocks_of_small_medians_are_spared():
    """Unimportances 1, 4 and 2: importance falls with them, sparsity rises linearly within a window of 0.3."""
    blocks = [make_block(torch.full((2, 3), value), name=f"b{value:g}") for value in (1.0, 4.0, 2.0)]
    evaluator = FakeTrials(blocks, activations={f"b{value}.0": torch.ones(3) for value in (1, 4, 2)})
    allocation = DLP().allocate(evaluator, 0.7)
    assert allocation.decisions == {"dlp": {"medians": [1.0, 4.0, 2.0]}}
    assert list(allocation.plan.sparsity.values()) == pytest.approx([0.7 - 0.4 / 3, 0.7 + 0.5 / 3, 0.7 - 0.1 / 3])
