"""Values of few bits within reconstruction: exact codes, a loss that never grows, and optima found by trying everything."""

import pytest
import torch
from random_layers import dampened, hessian_of
from trained import loss as plain_loss

from optimum_neuronal.formats.codebooks import BITS, TABLES, magnitudes
from optimum_neuronal.formats.coded import CodedWeight
from optimum_neuronal.saliency.rounding import PASSES, choose_codebook, round_kept, round_nearest


def sparse(rows: int, columns: int, sparsity: float = 0.6, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = 0.03 * torch.randn(rows, columns, generator=generator)
    return weight.masked_fill(weight.abs() < weight.abs().quantile(sparsity), 0)


def loss(target: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    return plain_loss(target, weight, dampened(hessian))


def rounded(weight, target, hessian, bits, dtype=torch.float32, passes=PASSES):
    levels = choose_codebook([(weight, hessian.diagonal())], bits, dtype)
    return round_kept(weight, target, hessian, levels, dtype, passes).to(dtype)


def test_what_comes_out_has_exact_codes_on_the_same_support():
    for bits in BITS:
        for dtype in [torch.float32, torch.bfloat16, torch.float16]:
            for shape in [(1, 1), (9, 40), (4, 140)]:
                weight, hessian = sparse(*shape), hessian_of(shape[1])
                weight[0] = 0  # a row that keeps nothing
                hessian[:, -1] = hessian[-1, :] = 0  # an input that is always zero
                copies = weight.clone(), hessian.clone()
                found = rounded(weight, weight, hessian, bits, dtype)
                assert torch.equal(found != 0, weight != 0)
                coded = CodedWeight.exact(found, bits)
                assert coded is not None and torch.equal(coded.unpack(), found)
                assert torch.equal(weight, copies[0]) and torch.equal(hessian, copies[1])


def test_it_loses_less_than_the_nearest_levels():
    for bits, most in [(2, 0.85), (3, 0.8), (4, 0.8), (8, 1.0)]:
        weight, hessian = sparse(30, 150), hessian_of(150)
        nearest = loss(weight, CodedWeight.nearest(weight, bits).unpack(), hessian)
        assert loss(weight, rounded(weight, weight, hessian, bits), hessian) < most * nearest


def test_no_sweep_raises_the_loss():
    weight, hessian = sparse(20, 200), hessian_of(200)
    losses = [loss(weight, rounded(weight, weight, hessian, 3, passes=passes), hessian) for passes in range(7)]
    assert all(after <= before * (1 + 1e-6) for before, after in zip(losses, losses[1:]))
    assert losses[-1] < 0.8 * losses[0]


def test_in_the_end_no_value_has_a_better_level():
    """Every other level of every value is tried, the scales being what they are."""
    weight, hessian = sparse(3, 20), hessian_of(20)
    found = rounded(weight, weight, hessian, 2, passes=100)
    coded, least = CodedWeight.exact(found, 2), loss(weight, found, hessian)
    tried = 0
    for row, column in (found != 0).nonzero().tolist():
        for level in coded.table.tolist():
            other = found.clone()
            other[row, column] = coded.scales[row, 0].float() * level
            assert loss(weight, other, hessian) >= least * (1 - 1e-5)
            tried += 1
    assert tried == 4 * int((weight != 0).sum())


def test_values_make_up_for_the_weights_that_fell():
    """Toward the dense weight, not toward the sparse one: an input that equals another takes its weight over."""
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    inputs[:, 1] = inputs[:, 0]
    target = torch.tensor([[1.0, 1.0, -2.0, 2.0]])
    weight = torch.tensor([[1.0, 0.0, -2.0, 2.0]])
    found = rounded(weight, target, inputs.T @ inputs, 2)
    assert found[0].tolist() == pytest.approx([2.0, 0.0, -2.0, 2.0], rel=0.02)


def test_a_row_does_not_depend_on_the_others():
    weight, hessian = sparse(6, 140), hessian_of(140)
    levels = magnitudes(TABLES[3][4])
    whole = round_kept(weight, weight, hessian, levels, torch.float32)
    alone = round_kept(weight[2:3], weight[2:3], hessian, levels, torch.float32)
    assert torch.equal(whole[2:3], alone)


def test_the_levels_are_those_that_values_lie_at():
    """For all parts together: the part of larger values decides."""
    importance = torch.ones(64)
    for bits in (2, 3, 4):
        for table in TABLES[bits]:
            weight = torch.tensor(table)[torch.arange(5 * 64) % 2**bits].view(5, 64) * 0.25
            assert choose_codebook([(weight, importance)], bits, torch.float32) == magnitudes(table)
    narrow, wide = (torch.tensor(TABLES[2][place])[torch.arange(64) % 4].view(1, 64) * 1.0 for place in (0, -1))
    for many, few, table in ((narrow, wide, 0), (wide, narrow, -1)):
        parts = [(weight, importance) for weight in (many, few * 0.1)]
        assert choose_codebook(parts, 2, torch.float32) == magnitudes(TABLES[2][table])


def test_errors_of_inputs_that_count_more_are_smaller():
    weight = sparse(40, 64, 0)
    importance = torch.where(torch.arange(64) < 8, 100.0, 1.0)
    levels = magnitudes(TABLES[2][0])
    plain, weighted = (round_nearest(weight, i, levels, torch.float32) for i in (torch.ones(64), importance))
    errors = [(found - weight).square() for found in (plain, weighted)]
    assert errors[1][:, :8].sum() < 0.8 * errors[0][:, :8].sum()
    assert errors[1][:, 8:].sum() > errors[0][:, 8:].sum()
    assert CodedWeight.exact(weighted, 2) is not None
