from itertools import product

import pytest
import torch
from by_hand import FakeTrials, make_block

from optimum_neuronal.topup.dlp import DLP, median_metric


def test_median_by_hand():
    """Metrics 1 2 6 of one projection, 4 10 of the other: the median is 4; without 10 it is the lower of 2 and 4."""
    activations = {"block.0": torch.tensor([1.0, 2.0, 2.0]), "block.1": torch.tensor([1.0, 2.0])}
    assert median_metric(make_block([[1, -1, 3]], [[4, 5]]), activations) == 4
    activations["block.1"] = torch.tensor([1.0])
    assert median_metric(make_block([[1, -1, 3]], [[-4.0]]), activations) == 2


def test_median_is_exact():
    for rows, scale in product([1, 6, 7], [1e-30, 1.0, 1e30]):
        generator = torch.Generator().manual_seed(rows)
        weights = [torch.randn(rows, 33, generator=generator) * scale for _ in range(3)]
        weights[1][:, :20] = 0  # many equal values
        activations = {f"block.{index}": torch.rand(33, generator=generator) for index in range(3)}
        metric = torch.cat([(w.abs() * a).flatten() for w, a in zip(weights, activations.values())])
        assert median_metric(make_block(*weights), activations) == metric.median().item()


def test_blocks_of_small_medians_are_spared():
    """Unimportances 1, 4 and 2: importance falls with them, sparsity rises linearly within a window of 0.3."""
    blocks = [make_block(torch.full((2, 3), value), name=f"b{value:g}") for value in (1.0, 4.0, 2.0)]
    evaluator = FakeTrials(blocks, activations={f"b{value}.0": torch.ones(3) for value in (1, 4, 2)})
    allocation = DLP().allocate(evaluator, 0.7)
    assert allocation.decisions == {"dlp": {"medians": [1.0, 4.0, 2.0]}}
    importance = 1 - torch.tensor([1.0, 4.0, 2.0]) / 7  # the paper's relative importance
    scaled = (importance - importance.min()) / (importance.max() - importance.min()) * 0.3
    assert list(allocation.plan.sparsity.values()) == pytest.approx((0.7 + scaled.mean() - scaled).tolist())
    assert list(allocation.plan.sparsity.values()) == pytest.approx([0.7 - 0.4 / 3, 0.7 + 0.5 / 3, 0.7 - 0.1 / 3])
