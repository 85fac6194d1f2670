import pytest
import torch
from torch.nn.utils import prune

from optimum_neuronal.sparsity import cuts as masks
from optimum_neuronal.sparsity.cuts import (
    ColumnPattern,
    PackedMask,
    PackedWeight,
    SparsityPlan,
    apply_change,
    apply_cut,
    find_cut,
    prune_columns,
    prune_rows,
    row_counts,
    row_sparsity,
    sort_rows,
)


def test_counts_carry_the_remainder_from_row_to_row():
    counts = row_counts(0.7, (10, 128))  # 89.6 weights a row
    assert counts.tolist() == [89, 90, 89, 90, 90, 89, 90, 89, 90, 90]
    assert counts.sum() == 896


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (64, 128), (1000, 333)])
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 2 / 3, 0.7, 0.99, 1.0])
def test_counts_are_within_one_weight_of_the_target(shape, sparsity):
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


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (8, 8), (17, 33)])
def test_packing_is_lossless(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.7
    packed = PackedMask.pack(mask)
    assert torch.equal(packed.unpack(), mask)
    assert packed.bits.numel() == -(-mask.numel() // 8)


def test_row_sparsity_counts_zeros():
    assert row_sparsity(torch.tensor([[0.0, 1.0], [0.0, -0.0]])).tolist() == [0.5, 1.0]


class TestColumnPattern:
    def test_by_hand(self):
        saliency = torch.tensor([[1.0, 4.0, 2.0, 3.0, 5.0, 5.0, 5.0, 0.0]])
        expected = [[True, False, True, False, True, False, False, True]]  # of equal ones the first falls
        assert prune_columns(saliency, ColumnPattern.parse("2:4")).tolist() == expected
        assert prune_columns(saliency, ColumnPattern(1, 8)).sum() == 7

    @pytest.mark.parametrize("text", ["2:4", "4:8", "1:4"])
    def test_every_group_keeps_its_number(self, text):
        pattern = ColumnPattern.parse(text)
        mask = prune_columns(torch.rand(6, 32, generator=torch.Generator().manual_seed(0)), pattern)
        kept = (~mask).view(6, -1, pattern.group).sum(dim=-1)
        assert (kept == pattern.kept).all() and str(pattern) == text
        assert mask.float().mean().item() == pytest.approx(pattern.sparsity)

    @pytest.mark.parametrize("text", ["", "2", "4:2", "2:2", "0:4", "a:b", "-1:4", 24, None])
    def test_anything_else_is_refused(self, text):
        with pytest.raises(ValueError, match="expected 'N:M'"):
            ColumnPattern.parse(text)

    def test_torch_accepts_the_result_where_it_supports_it(self):
        weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).half()
        weight.masked_fill_(prune_columns(weight.abs().float(), ColumnPattern(2, 4)), 0)
        if not torch.cuda.is_available():  # the compression kernels are CUDA's
            assert ((weight.view(32, -1, 4) != 0).sum(dim=-1) <= 2).all()
            return
        sparse = torch.sparse.to_sparse_semi_structured(weight.cuda())
        assert torch.equal(sparse.to_dense().cpu(), weight)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_come_back_bit_for_bit(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7] = 0
    packed = PackedWeight.pack(weight)
    assert torch.equal(packed.change(), weight) and torch.equal(packed.unpack(), weight == 0)
    target = torch.ones(shape, dtype=dtype)
    apply_change(target, packed.change())
    assert torch.equal(target, weight)
    apply_change(target, torch.ones(shape, dtype=torch.bool))
    assert not target.any()
