import pytest
import torch

from optimum_neuronal.saliency.plan import SparsityPlan, row_counts


def test_counts_carry_the_remainder_from_row_to_row():
    counts = row_counts(0.7, (10, 128))  # 89.6 weights a row
    assert counts.tolist() == [89, 90, 89, 90, 90, 89, 90, 89, 90, 90]
    assert counts.sum() == 896


def test_counts_are_within_one_weight_of_the_target():
    for shape in [(1, 1), (3, 7), (64, 128), (1000, 333)]:
        for sparsity in [0.0, 0.1, 0.5, 2 / 3, 0.7, 0.99, 1.0]:
            counts = row_counts(sparsity, shape)
            floor = int(shape[1] * sparsity + 1e-9)
            assert set(counts.tolist()) <= {floor, floor + 1}
            assert abs(counts.sum().item() - sparsity * shape[0] * shape[1]) <= 1


def test_counts_of_rows_of_their_own():
    sparsity = torch.tensor([0.25, 0.5, 1.0, 0.0], dtype=torch.float64)
    assert row_counts(sparsity, (4, 8)).tolist() == [2, 4, 8, 0]


def test_plan_outside_zero_and_one_is_refused():
    with pytest.raises(ValueError, match="'q' leaves"):
        SparsityPlan({"q": 1.2})
    with pytest.raises(ValueError, match="'q' leaves"):
        SparsityPlan({"q": torch.tensor([0.5, float("nan")])})
