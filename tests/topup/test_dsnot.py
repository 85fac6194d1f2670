import pytest
import torch
from by_hand import make_projection
from conftest import make_model

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.statistics import InputSums
from optimum_neuronal.topup.dsnot import DSnoT, mean_and_variance


def around(*means, deviation=1.0):
    """Statistics of features of these means that swing around them by a standard deviation."""
    mean = torch.tensor(means, dtype=torch.float32)
    statistic, swing = InputSums(), torch.as_tensor(deviation)
    statistic.update(torch.stack([mean - swing, mean + swing])[None], sequences=1)
    return statistic


def refined(row, pruned, statistic, **fields):
    """Indices of the weights of one row that are pruned after the refinement."""
    projection, mask = make_projection([row]), torch.tensor([[index not in pruned for index in range(len(row))]])
    before = mask.clone()
    found = DSnoT(**fields).refine(projection, mask, projection.weight.abs(), statistic)
    assert torch.equal(mask, before) and int((~found).sum()) == len(pruned)
    return set((~found)[0].nonzero().flatten().tolist())


def test_moments_are_over_all_tokens():
    statistic = InputSums()
    tokens = torch.tensor([[[1.0], [3.0]], [[5.0], [7.0]]])  # two sequences of two tokens
    statistic.update(tokens, sequences=2)
    mean, variance = mean_and_variance(statistic)
    assert mean.tolist() == [4.0] and variance.tolist() == pytest.approx([5.0])


def test_an_exchange_by_hand():
    """Expected outputs 3 and 2 are pruned, the output falls by 5. Taking 3 back leaves 2; of the kept weights only
    -1 raises it when pruned, by -1: what remains is 1, and nothing is left to give up."""
    row, statistic = [3.0, 2.0, -1.0, 4.0], around(1, 1, 1, 1)
    assert refined(row, {0, 1}, statistic) == {1, 2}
    assert refined(row, {0, 1}, statistic, cycles=0) == {0, 1}


def test_a_row_stops_before_its_shift_changes_sign_or_at_the_threshold():
    """Two cycles take 10 back and give -1 up, then 3 and -2: shifts 20, 9, 4. A third, 7 and -3, would make it -6."""
    row = [10.0, 3.0, 7.0, -1.0, -2.0, -3.0]
    statistic = around(1, 1, 1, 1, 1, 1, deviation=[1.0, 2.0, 9.0, 1.0, 1.0, 1.0])
    assert refined(row, {0, 1, 2}, statistic) == {2, 3, 4}
    assert refined(row, {0, 1, 2}, statistic, cycles=1) == {1, 2, 3}
    assert refined(row, {0, 1, 2}, statistic, threshold=9) == {1, 2, 3}
    assert refined(row, {0, 1, 2}, statistic, threshold=20) == {0, 1, 2}


def test_the_authors_code_by_hand(monkeypatch):
    """Outputs are sums over two tokens. Three cycles give 20, 6 and 14 back for -2, -4 and -6; the sign may change."""
    row, name = [10.0, 3.0, 7.0, -1.0, -2.0, -3.0], "layers.0.self_attn.q_proj"
    statistic = around(1, 1, 1, 1, 1, 1, deviation=[1.0, 2.0, 9.0, 1.0, 1.0, 1.0])
    assert refined(row, {0, 1, 2}, statistic, variant="authors") == {3, 4, 5}
    # The first row is done after one exchange, with a shift of -2; its third cycle prunes another weight. The second row
    # has nothing else to restore: it takes back, in turn, what it pruned, 1, and a weight that it kept, 4.
    rows, mask = (
        [[10.0, -1.0, -2.0, -3.0, 5.0], [10.0, -5.0, -6.0, -7.0, 5.0]],
        torch.tensor([[False] + 4 * [True]] * 2),
    )
    topup, statistic = DSnoT(cycles=3, threshold=3, variant="authors"), around(1, 1, 1, 1, 1)
    projection = make_projection(rows, name)
    found = topup.refine(projection, mask, projection.weight.abs(), statistic)
    assert [(~own).nonzero().flatten().tolist() for own in found] == [[1, 2], [2]]
    monkeypatch.setattr("optimum_neuronal.topup.dsnot.ROWS_AT_A_TIME", 1)
    assert torch.equal(topup.refine(projection, mask, projection.weight.abs(), statistic), found), "rows wait"
    mlp = make_projection(rows, "layers.0.mlp.up_proj")
    assert torch.equal(topup.refine(mlp, mask, mlp.weight.abs(), statistic), mask), "left alone"


def test_inputs_that_are_always_the_same_or_zero():
    """Features 0 and 1 never vary, and feature 3 is always zero; or all of them are; or no token came at all."""
    row, constant = [3.0, 2.0, -1.0, 4.0], around(1, 1, 1, 0, deviation=[0.0, 0.0, 1.0, 0.0])
    assert refined(row, {0, 1}, constant) == {1, 2}
    assert refined(row, {0, 1}, around(0, 0, 0, 0, deviation=0.0)) == {0, 1}
    nothing = InputSums()
    nothing.update_routed(torch.empty(0, 4), torch.empty(0, dtype=torch.int64), tokens=3)
    assert refined(row, {0, 1}, nothing) == {0, 1}


def one_by_one(row, mask, mean, variance, norm, cycles, threshold):
    """The method as DSnoT's docstring describes it, cycle by cycle."""
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
    monkeypatch.setattr("optimum_neuronal.topup.dsnot.ROWS_AT_A_TIME", 7)
    generator = torch.Generator().manual_seed(0)
    statistic = InputSums()
    statistic.update(torch.randn(4, 9, 40, generator=generator) + torch.randn(40, generator=generator), sequences=4)
    projection = make_projection(torch.randn(20, 40, generator=generator))
    mask = torch.rand(20, 40, generator=generator) >= torch.linspace(0, 1, 20)[:, None]
    found = DSnoT(cycles, threshold).refine(projection, mask, projection.weight.abs(), statistic)
    mean, variance = mean_and_variance(statistic)
    norm = statistic.value.mean(dim=0).sqrt()
    expected = [
        one_by_one(row, own, mean, variance, norm, cycles, threshold) for row, own in zip(projection.weight, mask)
    ]
    assert torch.equal(found, torch.stack(expected)) and not torch.equal(found, mask)
    assert torch.equal(found.sum(dim=1), mask.sum(dim=1))


@pytest.mark.usefixtures("batched")
@pytest.mark.parametrize("family, saliency", [("llama", "magnitude"), ("mixtral", "wanda"), ("gpt2", "wanda")])
def test_a_model_keeps_its_sparsity_and_changes_its_masks(family, saliency, ids):
    fields, zeros = {"num_samples": 6, "num_alignment_samples": 2, "seq_length": 16, "min_expert_tokens": 1}, []
    for topup, batch_size in (("uniform", 1), ("dsnot", 1), ("dsnot", 3)):
        model, config = make_model(family), NeuronALConfig(0.6, saliency, topup=topup, **fields)
        NeuronALPruner(config).prune(model, dataset=ids[:6], batch_size=batch_size)
        zeros.append({name: weight == 0 for name, weight in model.named_parameters()})
    uniform, refined, batched = zeros
    assert sum(map(torch.sum, uniform.values())) == sum(map(torch.sum, refined.values()))
    assert any(not torch.equal(uniform[name], refined[name]) for name in uniform)
    assert all(torch.equal(refined[name], batched[name]) for name in refined)


def test_the_masks_of_starved_experts_stay(ids):
    """Moments of a few tokens say nothing."""
    found = []
    for topup in ("uniform", "dsnot"):
        model = make_model("mixtral")
        fields = {"num_samples": 6, "num_alignment_samples": 2, "seq_length": 16, "min_expert_tokens": 1000}
        NeuronALPruner(NeuronALConfig(0.6, "wanda", topup=topup, **fields)).prune(model, dataset=ids[:6])
        found.append(model.model.layers[0].mlp.experts.gate_up_proj)
    assert torch.equal(*found)
