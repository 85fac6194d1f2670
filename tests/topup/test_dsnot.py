from dataclasses import replace

import pytest
import torch
from by_hand import make_projection
from conftest import make_model

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.topup.dsnot import AuthorsDSnoTRefinement, DSnoTRefinement, InputSums


def around(*means, deviation=1.0):
    """Statistics of features of these means that swing around them by a standard deviation."""
    mean = torch.tensor(means, dtype=torch.float32)
    statistic, swing = InputSums(), torch.as_tensor(deviation)
    statistic.update(torch.stack([mean - swing, mean + swing])[None], sequences=1)
    return statistic


def exchanged(row, pruned, statistic, cycles=50, threshold=0.1, kind=DSnoTRefinement):
    """Indices of the weights of one row that are pruned after the exchange."""
    mask = torch.tensor([[index not in pruned for index in range(len(row))]])
    before = mask.clone()
    after = kind(cycles, threshold).exchange(make_projection([row]), mask, statistic)
    assert torch.equal(mask, before) and int((~after).sum()) == len(pruned)
    return set((~after)[0].nonzero().flatten().tolist())


def test_moments_are_over_all_tokens():
    statistic = InputSums()
    tokens = torch.tensor([[[1.0], [3.0]], [[5.0], [7.0]]])  # two sequences of two tokens
    statistic.update(tokens, sequences=2)
    mean, variance = DSnoTRefinement(50, 0.1).moments(statistic)
    assert mean.tolist() == [4.0] and variance.tolist() == pytest.approx([5.0])


def test_a_row_stops_before_its_shift_changes_sign_or_at_the_threshold():
    """Two cycles take 10 back and give -1 up, then 3 and -2: shifts 20, 9, 4. A third, 7 and -3, would make it -6."""
    row = [10.0, 3.0, 7.0, -1.0, -2.0, -3.0]
    statistic = around(1, 1, 1, 1, 1, 1, deviation=[1.0, 2.0, 9.0, 1.0, 1.0, 1.0])
    assert exchanged(row, {0, 1, 2}, statistic) == {2, 3, 4}
    assert exchanged(row, {0, 1, 2}, statistic, cycles=1) == {1, 2, 3}
    assert exchanged(row, {0, 1, 2}, statistic, threshold=9) == {1, 2, 3}
    assert exchanged(row, {0, 1, 2}, statistic, threshold=20) == {0, 1, 2}


def test_the_authors_code_by_hand():
    """Outputs are sums over two tokens. Three cycles give 20, 6 and 14 back for -2, -4 and -6; the sign may change."""
    row, name = [10.0, 3.0, 7.0, -1.0, -2.0, -3.0], "layers.0.self_attn.q_proj"
    statistic = around(1, 1, 1, 1, 1, 1, deviation=[1.0, 2.0, 9.0, 1.0, 1.0, 1.0])
    assert exchanged(row, {0, 1, 2}, statistic, kind=AuthorsDSnoTRefinement) == {3, 4, 5}
    # The first row is done after one exchange, with a shift of -2; its third cycle prunes another weight. The second row
    # has nothing else to restore: it takes back, in turn, what it pruned, 1, and a weight that it kept, 4.
    rows = [[10.0, -1.0, -2.0, -3.0, 5.0], [10.0, -5.0, -6.0, -7.0, 5.0]]
    mask, statistic = torch.tensor([[False] + 4 * [True]] * 2), around(1, 1, 1, 1, 1)
    theirs = AuthorsDSnoTRefinement(3, 3)
    after = theirs.exchange(make_projection(rows, name), mask, statistic)
    assert [(~kept).nonzero().flatten().tolist() for kept in after] == [[1, 2], [2]]
    for role, is_left_alone in [("query", False), ("output", False), ("up", True), ("down", True)]:
        projection = replace(make_projection(rows, "layers.0.fc1"), role=role)  # of OPT, not in a module `mlp`
        assert torch.equal(theirs.exchange(projection, mask, statistic), mask) == is_left_alone


def test_the_authors_code_prunes_the_first_kept_weight_in_place_of_one_without_output():
    """Kept are 2, 3 and -5, whose outputs are 2, 0 and -5. Two cycles give -9 and -8 back; both prune 2, and 3 stays."""
    row, mean = torch.tensor([[-9.0, -8.0, -7.0, 2.0, 3.0, -5.0]]), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    mask = torch.tensor([3 * [False] + 3 * [True]])
    after = AuthorsDSnoTRefinement(2, 0.1).exchange_rows(row, mask, mean, torch.ones(6), torch.ones(6))
    assert after[0].nonzero().flatten().tolist() == [0, 1, 4, 5]


def test_inputs_that_are_always_the_same_or_zero():
    """Features 0 and 1 never vary, and feature 3 is always zero; or all of them are."""
    row, constant = [3.0, 2.0, -1.0, 4.0], around(1, 1, 1, 0, deviation=[0.0, 0.0, 1.0, 0.0])
    assert exchanged(row, {0, 1}, constant) == {1, 2}
    assert exchanged(row, {0, 1}, around(0, 0, 0, 0, deviation=0.0)) == {0, 1}


def one_by_one(row, mask, mean, variance, norm, cycles, threshold):
    """The method as its docstring describes it, cycle by cycle."""
    output, mask = row * mean, mask.clone()
    pruned, kept = set((~mask).nonzero().flatten().tolist()), set(mask.nonzero().flatten().tolist())
    shift = output[~mask].sum()
    for _ in range(cycles):
        grow = [index for index in pruned if output[index] * shift > 0]
        fall = [index for index in kept if output[index] * shift < 0]
        if abs(shift) <= threshold or not grow or not fall:
            break
        grown = max(grow, key=lambda index: abs(output[index]) / variance[index])
        fallen = min(fall, key=lambda index: abs(row[index]) * norm[index])
        after = shift - output[grown] + output[fallen]
        if after * shift <= 0:
            break
        shift = after
        mask[grown], mask[fallen] = True, False
        pruned.remove(grown)
        kept.remove(fallen)
    return mask


@pytest.mark.parametrize("cycles, threshold", [(50, 0.1), (50, 0.0), (3, 0.0), (50, 1.0)])
def test_all_rows_at_once_are_a_loop_over_cycles(cycles, threshold, monkeypatch):
    monkeypatch.setattr("optimum_neuronal.topup.dsnot.SORTED_ROWS", 7)
    generator = torch.Generator().manual_seed(0)
    statistic = InputSums()
    statistic.update(torch.randn(4, 9, 40, generator=generator) + torch.randn(40, generator=generator), sequences=4)
    projection = make_projection(torch.randn(20, 40, generator=generator))
    mask = torch.rand(20, 40, generator=generator) >= torch.linspace(0, 1, 20)[:, None]
    after = DSnoTRefinement(cycles, threshold).exchange(projection, mask, statistic)
    mean, variance = DSnoTRefinement(50, 0.1).moments(statistic)
    norm = statistic.value.mean(dim=0).sqrt()
    rows = zip(projection.weight, mask)
    expected = [one_by_one(row, kept, mean, variance, norm, cycles, threshold) for row, kept in rows]
    assert torch.equal(after, torch.stack(expected)) and not torch.equal(after, mask)


def zeros_of_prune(family, saliency, topup, ids, **fields):
    """Where the parameters of a pruned model are zero."""
    model, sizes = make_model(family), {"num_samples": 6, "num_alignment_samples": 2, "seq_length": 16}
    config = NeuronALConfig(0.6, saliency, topup=topup, **{**sizes, "min_expert_tokens": 1, **fields})
    NeuronALPruner(config).prune(model, dataset=ids[:6])
    return {name: weight == 0 for name, weight in model.named_parameters()}


@pytest.mark.parametrize("family, saliency", [("llama", "magnitude"), ("mixtral", "wanda"), ("gpt2", "wanda")])
def test_a_model_keeps_its_sparsity_and_changes_its_masks(family, saliency, ids):
    uniform, dsnot = (zeros_of_prune(family, saliency, topup, ids) for topup in ("uniform", "dsnot"))
    without = zeros_of_prune(family, saliency, "dsnot", ids, topup_args={"cycles": 0})
    assert sum(map(torch.sum, uniform.values())) == sum(map(torch.sum, dsnot.values()))
    assert any(not torch.equal(uniform[name], dsnot[name]) for name in uniform)
    assert all(torch.equal(uniform[name], without[name]) for name in uniform)


def test_the_masks_of_starved_experts_stay(ids):
    """Moments of a few tokens say nothing."""
    zeros = [zeros_of_prune("mixtral", "wanda", topup, ids, min_expert_tokens=1000) for topup in ("uniform", "dsnot")]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(*(parameters[name] for parameters in zeros))
