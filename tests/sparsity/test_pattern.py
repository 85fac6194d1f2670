import pytest
import torch

from optimum_neuronal.sparsity.pattern import ColumnPattern, prune_columns


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
