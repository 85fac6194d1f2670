import math

import pytest
import torch
from conftest import FEW, make_model
from sweeps import build_sweep

from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.replay import replay
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import Projection
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.sparsity.masks import NewWeight
from optimum_neuronal.topup import besa
from optimum_neuronal.topup.besa import BESA, LearnedRate, reconstruction_loss, tilted


def make_sweep(model, ids, saliency="wanda", **arguments):
    return build_sweep(find_decoder(model), SALIENCIES.get(saliency)(), ids, 4, **arguments)


def by_block(decoder, sparsities):
    """Weighted mean of every block."""
    means = []
    for block in decoder.blocks:
        sizes = [math.prod(p.shape) for p in block.pruned]
        means.append(sum(sparsities[p.name] * size for p, size in zip(block.pruned, sizes)) / sum(sizes))
    return means


def allocate(model, ids, sparsity=0.6, saliency="wanda", batch_size=1, **fields):
    with inference(model):
        return BESA(**fields).allocate(make_sweep(model, ids, saliency, batch_size=batch_size), sparsity)


class TestRate:
    """One projection of two rows and four inputs; candidates 0, 0.25, ..., 1."""

    score = torch.tensor([[4.0, 1.0, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]])

    def rate(self, sparsity=0.5):
        projection = Projection("p", None, torch.nn.Linear(4, 2), True)
        return LearnedRate(projection, self.score, sparsity, 0.25)

    def test_begins_with_equal_probabilities_at_half(self):
        rate = self.rate()
        assert rate.logits.softmax(dim=0).tolist() == pytest.approx([0.2] * 5)
        assert rate.sparsity.item() == pytest.approx(0.5)

    def test_probability_by_rank(self):
        """The least salient falls by four of five candidates, the most salient by one."""
        assert self.rate().kept.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8])

    def test_mask_prunes_the_least_salient(self):
        assert self.rate().mask().tolist() == [[True, False, True, False], [False, False, True, True]]

    def test_gradients_are_gathered_by_rank(self):
        gradient = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])
        assert self.rate().by_rank(gradient).tolist() == [12.0, 24.0, 33.0, 41.0]

    def test_gradient_goes_to_the_candidates_that_prune_the_rank(self):
        """d kept_0 / d logit_d = -p_d (prunes_d - mean): only the candidate 0 keeps rank 0."""
        rate = self.rate()
        rate.kept[0].backward()
        assert rate.logits.grad.tolist() == pytest.approx([0.2 * 0.8] + [-0.2 * 0.2] * 4)


@pytest.mark.parametrize("mean", [0.01, 0.3, 0.5, 0.7, 0.97])
def test_tilted_has_the_mean(mean):
    rates = torch.arange(101, dtype=torch.float64) / 100
    logits = tilted(rates, mean)
    assert (logits.softmax(dim=0) @ rates).item() == pytest.approx(mean)
    assert (logits - logits[0]).tolist() == pytest.approx((rates * (logits[-1] - logits[0])).tolist())


def test_loss_by_hand():
    target = torch.tensor([[[3.0, 1.0], [4.0, 0.0]]])  # two tokens; squared norms of the features 25 and 1
    output = torch.tensor([[[3.0, 1.0], [3.0, 2.0]]])  # squared differences 1 and 4
    assert reconstruction_loss(output, target).item() == pytest.approx((1 / 25 + 4 / 1) / 2)


def test_mask_gradients_are_those_of_the_loss(ids):
    """A weight whose mask is 1 - epsilon rather than 1 changes the loss by epsilon times its gradient."""
    model = make_model("llama").double()
    with inference(model):
        sweep = make_sweep(model, ids)
        inputs, block = sweep.engine.runner.capture(ids[:1]), sweep.decoder.blocks[0]
        hidden, call = inputs.hidden[0], inputs.calls[0][0]
        target = replay(block, [hidden], [call])[0][0]
        rates = [LearnedRate(p, p.weight.abs().float(), 0.5, 0.25) for p in block.pruned]
        gradients = besa._mask_gradients(block, rates, hidden, call, target)
        for rate, gradient in zip(rates, gradients):
            changed = finite_difference(sweep, block, rates, rate, rank=20, data=(hidden, call, target))
            assert gradient[20].item() == pytest.approx(changed, rel=2e-2, abs=1e-6), rate.projection.name


def finite_difference(sweep, block, rates, moved, rank, data, epsilon=1e-4):
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


def test_irrelevant_weights_are_pruned_more(ids):
    """Nine tenths of the weights of the first block's values are made nearly zero: they may fall unnoticed."""
    model, name = make_model("llama"), "model.layers.0.self_attn.v_proj"
    usual = allocate(model, ids).plan.sparsity
    weight = model.get_parameter(f"{name}.weight").data
    weight[:, torch.arange(weight.shape[1]) % 10 != 0] *= 1e-4
    found = allocate(model, ids).plan.sparsity
    block = find_decoder(model).blocks[0].pruned_names
    assert max(block, key=found.get) == name != max(block, key=usual.get)
    assert found[name] > usual[name] + 0.1


@pytest.mark.parametrize("family", [*FEW, "gemma4_text"])
def test_every_family_learns_and_meets_the_target(family, ids):
    """Fused and transposed weights and experts too; nothing is left behind."""
    model = make_model(family)
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    required = [parameter.requires_grad for parameter in parameters]
    before = [parameter.detach().clone() for parameter in parameters]
    allocation = allocate(model, ids)
    assert by_block(find_decoder(model), allocation.plan.sparsity) == pytest.approx([0.6] * len(model_blocks(model)))
    assert len(set(allocation.plan.sparsity.values())) > 1
    assert [parameter.requires_grad for parameter in parameters] == required
    assert all(parameter.grad is None for parameter in parameters)
    assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before))
    assert not any(module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules())


def model_blocks(model):
    return find_decoder(model).blocks


def test_the_batch_size_does_not_matter(llama, ids):
    plans = [allocate(llama, ids, batch_size=size).plan for size in (1, 3)]
    assert plans[0] == plans[1]


def test_blocks_see_what_sparse_blocks_before_them_put_out(llama, ids):
    """At another target the second block's inputs differ, and so does what it learns at the same one."""
    with inference(llama):
        sweep = make_sweep(llama, ids)
        name = sweep.decoder.blocks[1].pruned_names[0]
        whole = BESA().allocate(sweep, 0.6).plan.sparsity[name]
        only = build_sweep(find_decoder(llama, targets=[r"layers\.1\."]), sweep.saliency, ids, 4)
        assert BESA().allocate(only, 0.6).plan.sparsity[name] != whole


def test_without_epochs_it_is_uniform(llama, ids):
    assert set(allocate(llama, ids, epochs=0).plan.sparsity.values()) == {0.6}


def test_an_interrupt_leaves_nothing_behind(llama, ids, monkeypatch):
    before = {key: value.clone() for key, value in llama.state_dict().items()}

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(besa, "reconstruction_loss", interrupt)
    with pytest.raises(KeyboardInterrupt):
        allocate(llama, ids)
    assert all(parameter.requires_grad for parameter in llama.parameters())
    assert all(torch.equal(value, before[key]) for key, value in llama.state_dict().items())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"epochs": -1}, "epochs is -1: expected a whole number of at least 0"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast': expected a number of at least 0"),
        ({"penalty": math.nan}, "penalty is nan"),
        ({"candidate_step": 0.3}, "candidate_step is 0.3: expected a number that 1 is a multiple of"),
        ({"candidate_step": 0.0}, "candidate_step is 0.0: expected a number from 0.0001 to 0.5"),
    ],
)
def test_bad_hyper_parameters(arguments, message):
    error = TypeError if "learning_rate" in arguments else ValueError
    with pytest.raises(error, match=message):
        BESA(**arguments)
