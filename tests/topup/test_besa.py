import pytest
import torch
from by_hand import make_projection
from conftest import FEW, make_model
from trial_helpers import make_evaluator, state, unchanged

from optimum_neuronal.blocks.runner import replay
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.change import NewWeight
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.topup import besa
from optimum_neuronal.topup.besa import BESA, LearnedRate, tilted


def allocate(model, ids, sparsity=0.6, **chosen):
    with inference(model):
        return BESA().allocate(make_evaluator(model, ids, **chosen), sparsity)


def test_the_least_salient_falls_by_most_candidates():
    """Two rows and four inputs; candidates 0, 0.25, ..., 1, equally probable: it falls by four, the most salient by one."""
    score = torch.tensor([[4.0, 1.0, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    rate = LearnedRate(make_projection(torch.ones(2, 4)), score, 0.5, 0.25)
    assert rate.logits.softmax(dim=0).tolist() == pytest.approx([0.2] * 5)
    assert rate.sparsity.item() == pytest.approx(0.5)
    assert rate.kept.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rate.mask().tolist() == [[True, False, True, False], [False, False, True, True]]


def test_tilted_has_the_mean():
    rates = torch.arange(101, dtype=torch.float64) / 100
    for mean in [0.01, 0.3, 0.5, 0.7, 0.97]:
        logits = tilted(rates, mean)
        assert (logits.softmax(dim=0) @ rates).item() == pytest.approx(mean)
        assert (logits - logits[0]).tolist() == pytest.approx((rates * (logits[-1] - logits[0])).tolist())


def test_mask_gradients_are_those_of_the_loss(ids):
    """A weight whose mask is 1 - epsilon rather than 1 changes the loss by epsilon times its gradient."""
    model = make_model("llama").double()
    with inference(model):
        evaluator = make_evaluator(model, ids)
        inputs, block = evaluator.runner.capture(ids[:1]), evaluator.decoder.blocks[0]
        hidden, call = inputs.hidden[0], inputs.calls[0][0]
        target = replay(block, [hidden], [call])[0][0]
        rates = [LearnedRate(p, p.weight.abs().float(), 0.5, 0.25) for p in block.pruned]
        gradients = besa._mask_gradients(block, rates, hidden, call, target)
        for rate, gradient in zip(rates, gradients):
            changed = finite_difference(evaluator, block, rates, rate, rank=20, data=(hidden, call, target))
            assert gradient[20].item() == pytest.approx(changed, rel=2e-2, abs=1e-6), rate.projection.name


def finite_difference(evaluator, block, rates, moved, rank, data, epsilon=1e-4):
    """The loss's change when the masks of all weights of one rank rise, in every row of one projection."""
    hidden, call, target = data
    losses = []
    for sign in (1, -1):
        weights = {}
        for rate in rates:
            mask = rate.mask().double()
            if rate is moved:
                column = rate._order[:, rank : rank + 1].long()
                mask.scatter_add_(1, column, torch.full(column.shape, sign * epsilon, dtype=mask.dtype))
            weights[rate.projection.name] = rate.projection.weight * mask
        with besa.trial_weights(block.pruned, lambda projection, weights=weights: NewWeight(weights[projection.name])):
            output = replay(block, [hidden], [call])[0][0]
        scaled = (target - output).flatten(0, -2).square().sum(dim=0) / target.flatten(0, -2).square().sum(dim=0)
        losses.append(scaled.mean().item())
    return (losses[0] - losses[1]) / (2 * epsilon)


def test_irrelevant_weights_are_pruned_more(llama, ids):
    """Nine tenths of the weights of the first block's values are made nearly zero: they may fall unnoticed."""
    usual, name = allocate(llama, ids).plan.sparsity, "model.layers.0.self_attn.v_proj"
    weight = llama.get_parameter(f"{name}.weight").data
    weight[:, torch.arange(weight.shape[1]) % 10 != 0] *= 1e-4
    learned, names = allocate(llama, ids).plan.sparsity, find_decoder(llama).blocks[0].pruned_names
    assert max(names, key=learned.get) == name != max(names, key=usual.get)
    assert learned[name] > usual[name] + 0.1


@pytest.mark.parametrize("family", [*FEW, "gemma4_text"])
def test_every_family_learns_and_meets_the_target(family, ids):
    """Fused and transposed weights and experts too; nothing is left behind."""
    model = make_model(family)
    parameters, before = list(model.parameters()), state(model)
    parameters[0].requires_grad_(False)
    required = [parameter.requires_grad for parameter in parameters]
    learned = allocate(model, ids).plan.sparsity
    for block in find_decoder(model).blocks:
        total = sum(learned[projection.name] * projection.numel for projection in block.pruned)
        assert total / block.numel == pytest.approx(0.6)
    assert len(set(learned.values())) > 1
    assert [parameter.requires_grad for parameter in parameters] == required
    assert all(parameter.grad is None for parameter in parameters) and unchanged(model, before)


def test_blocks_see_what_sparse_blocks_before_them_put_out(llama, ids):
    """At another target the second block's inputs differ, and so does what it learns at the same one."""
    plans = [allocate(llama, ids, targets=targets).plan for targets in (None, [r"layers\.1\."])]
    first, second = (plan.sparsity["model.layers.1.self_attn.q_proj"] for plan in plans)
    assert first != second
