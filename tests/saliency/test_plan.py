import pytest
import torch

from optimum_neuronal.saliency import plan
from optimum_neuronal.saliency.plan import (
    ColumnPattern,
    Plan,
    apply_cut,
    find_cut,
    mask_groups,
    mask_rows,
    mask_whole,
    pruned_count,
    row_counts,
    sort_rows,
)


def test_counts_carry_the_remainder_from_row_to_row():
    assert row_counts(0.7, (10, 128)).tolist() == [89, 90, 89, 90, 90, 89, 90, 89, 90, 90], "89.6 weights a row"


# Sums of the last shape have more digits than a float32.
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (64, 128), (1000, 333), (4096, 11008)])
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.29, 0.5, 2 / 3, 0.7, 0.99, 1.0])
def test_counts_are_within_one_weight_of_the_target(sparsity, shape):
    counts, floor = row_counts(sparsity, shape), int(shape[1] * sparsity + 1e-9)
    assert set(counts.tolist()) <= {floor, floor + 1}
    assert abs(counts.sum().item() - sparsity * shape[0] * shape[1]) <= 1
    assert abs(pruned_count(sparsity, shape) - sparsity * shape[0] * shape[1]) <= 1


def test_a_product_that_is_rounded_down_loses_no_weight():
    assert 0.29 * 100 < 29
    assert row_counts(0.29, (1, 100)).tolist() == [29] and pruned_count(0.29, (10, 10)) == 29


def test_a_number_is_the_share_of_a_whole_matrix_and_a_tensor_that_of_rows():
    rows = torch.tensor([0.25, 0.5, 1.0, 0.0], dtype=torch.float64)
    assert row_counts(rows, (4, 8)).tolist() == pruned_count(rows, (4, 8)).tolist() == [2, 4, 8, 0]
    assert pruned_count(0.5, (4, 8)) == 16


@pytest.mark.parametrize("sparsity", [1.2, torch.tensor([0.5, float("nan")])])
def test_a_plan_outside_zero_and_one_raises(sparsity):
    with pytest.raises(ValueError, match="'q' leaves"):
        Plan({"q": sparsity})


def test_in_a_whole_matrix_equal_saliencies_of_earlier_rows_are_pruned_first():
    saliency = torch.tensor([[3.0, 1.0, 1.0], [0.0, 1.0, 6.0]])
    assert mask_whole(saliency, 0).all() and not mask_whole(saliency, 6).any() and not mask_whole(saliency, 7).any()
    assert mask_whole(saliency, 3).tolist() == [[True, False, False], [False, True, True]]


@pytest.mark.parametrize("keeps_first", [False, True])
def test_equal_saliencies_are_pruned_in_column_order_or_kept_in_it(keeps_first):
    saliency = torch.tensor([[1.0, 0.0, 1.0, 1.0, 2.0]]).repeat(6, 1)
    mask = mask_rows(saliency, torch.arange(6), keeps_first)
    order = [1, 3, 2, 0, 4] if keeps_first else [1, 0, 2, 3, 4]
    assert [(~row).nonzero().flatten().tolist() for row in mask] == [sorted(order[:count]) for count in range(6)]


@pytest.mark.parametrize("different", [2, 5, 10_000])
@pytest.mark.parametrize("shape", [(40, 65), (100, 1023), (100, 1024), (20, 2048)])
def test_masks_equal_a_stable_sort(shape, different, monkeypatch):
    monkeypatch.setattr(plan, "THREADED", 2**15)
    generator = torch.Generator().manual_seed(different)
    saliency = torch.randint(0, different, shape, generator=generator).float()
    for counts in (
        row_counts(0.7, shape),
        torch.randint(0, shape[1] + 1, (shape[0],), generator=generator),
        torch.tensor([0, shape[1]]).repeat(shape[0] // 2),
    ):
        order = torch.sort(saliency, dim=1, stable=True).indices
        kept = torch.arange(shape[1]) >= counts[:, None]
        expected = torch.zeros_like(saliency, dtype=torch.bool).scatter_(1, order, kept)
        for threads in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            assert torch.equal(mask_rows(saliency, counts), expected)
            assert torch.equal(mask_rows(saliency.T.contiguous().T, counts), expected)
            assert torch.equal(apply_cut(saliency, find_cut(sort_rows(saliency), counts)), expected)


def test_a_pattern_keeps_the_most_salient_of_every_group():
    saliency = torch.tensor([[1.0, 4.0, 2.0, 3.0, 5.0, 5.0, 5.0, 0.0]])
    expected = [[False, True, False, True, False, True, True, False]]  # of equal ones the first is pruned
    assert mask_groups(saliency, ColumnPattern.parse("2:4")).tolist() == expected
    assert mask_groups(saliency, ColumnPattern(1, 8)).sum() == 1


@pytest.mark.parametrize("text", ["", "2", "4:2", "2:2", "0:4", "a:b"])
def test_other_patterns_raise(text):
    with pytest.raises(ValueError, match="expected 'N:M'"):
        ColumnPattern.parse(text)
