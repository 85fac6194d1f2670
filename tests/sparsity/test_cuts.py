import pytest
import torch
from torch.nn.utils import prune

from optimum_neuronal.sparsity import cuts as masks
from optimum_neuronal.sparsity.cuts import apply_cut, find_cut, prune_rows, sort_rows
from optimum_neuronal.sparsity.plan import row_counts


def test_least_salient_weights_fall():
    saliency = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 4.0, 6.0]])
    mask = prune_rows(saliency, torch.tensor([2, 1]))
    assert mask.tolist() == [[False, True, False, True], [True, False, False, False]]


def test_equal_saliencies_fall_in_column_order():
    saliency = torch.tensor([[1.0, 0.0, 1.0, 1.0, 2.0]]).repeat(6, 1)
    mask = prune_rows(saliency, torch.arange(6))
    pruned = [row.nonzero().flatten().tolist() for row in mask]
    assert pruned == [[], [1], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("levels", [2, 5, 10_000])
def test_masks_equal_a_stable_sort(levels):
    generator = torch.Generator().manual_seed(levels)
    saliency = torch.randint(0, levels, (40, 65), generator=generator).float()
    counts = torch.randint(0, 66, (40,), generator=generator)
    order = torch.sort(saliency, dim=1, stable=True).indices
    expected = torch.zeros_like(saliency, dtype=torch.bool)
    for row, count in enumerate(counts):
        expected[row, order[row, :count]] = True
    assert torch.equal(prune_rows(saliency, counts), expected)


@pytest.mark.parametrize("levels", [2, 5, 10_000])
@pytest.mark.parametrize("shape", [(100, 1023), (100, 1024), (20, 2048)])
def test_large_matrices_equal_a_stable_sort(shape, levels, monkeypatch):
    monkeypatch.setattr(masks, "LARGE", 2**15)
    generator = torch.Generator().manual_seed(levels)
    saliency = torch.randint(0, levels, shape, generator=generator).float()
    for counts in (
        row_counts(0.7, shape),
        torch.randint(0, shape[1] + 1, (shape[0],), generator=generator),
        torch.tensor([0, shape[1]]).repeat(shape[0] // 2),
    ):
        order = torch.sort(saliency, dim=1, stable=True).indices
        pruned = torch.arange(shape[1]) < counts[:, None]
        expected = torch.zeros_like(saliency, dtype=torch.bool).scatter_(1, order, pruned)
        for threads in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            assert torch.equal(prune_rows(saliency, counts), expected)
            assert torch.equal(prune_rows(saliency.T.contiguous().T, counts), expected)
            assert torch.equal(apply_cut(saliency, find_cut(sort_rows(saliency), counts)), expected)


def test_one_ranking_serves_many_cuts():
    saliency = torch.rand(8, 16, generator=torch.Generator().manual_seed(0))
    ranked = sort_rows(saliency)
    for count in (0, 3, 16):
        counts = torch.full((8,), count)
        assert torch.equal(apply_cut(saliency, find_cut(ranked, counts)), prune_rows(saliency, counts))


def test_magnitude_by_row_equals_torch():
    weight = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    ours = prune_rows(weight.abs(), torch.full((6,), 14))
    for row in range(6):
        linear = torch.nn.Linear(20, 1, bias=False)
        linear.weight.data = weight[row : row + 1].clone()
        prune.l1_unstructured(linear, "weight", amount=14)
        assert torch.equal(linear.weight_mask[0] == 0, ours[row])
