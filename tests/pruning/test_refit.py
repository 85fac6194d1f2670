"""Refit: what it may change, what it must leave, and that it never makes a block worse."""

import copy
from dataclasses import replace
from functools import lru_cache
from itertools import count

import authors
import pytest
import torch
from conftest import make_model, memory_of
from trial_helpers import state, unchanged

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.refit import Refit, _product, _Weights, column_steps, first_zeros, relative_error
from optimum_neuronal.saliency.plan import Plan, row_counts

from .fitted import Fitted


FIELDS = {"topup": "uniform", "num_samples": 16, "num_alignment_samples": 4, "min_expert_tokens": 1}
SPARSEGPT = {"saliency": "sparsegpt"}
ALPS = {"saliency": "alps", "saliency_args": {"iterations": 9}}
METHODS = {"alps": ALPS, "sparsegpt": SPARSEGPT}


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids of 16 sequences: two batches, the second of which is held out."""
    return torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(1))


def prune(model, ids, work_dir=None, **fields):
    memory = memory_of(fields)
    fields = {**FIELDS, **SPARSEGPT, "refit_epochs": 2, "refit_learning_rate": 0.04, **fields}
    pruner = NeuronALPruner(NeuronALConfig(**{"sparsity": 0.6, **fields}))
    pruner.prune(model, ids, work_dir, **memory)
    return pruner


LAST = slice(-1, None)  # batch of the sequences that are held out


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "llama4_text"])
class TestFit:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_zeros_and_the_model_stay_and_the_held_out_error_falls(self, family, ids, dtype):
        fitted = Fitted(family, ids, dtype=dtype)
        for name, weight in fitted.found.items():
            assert weight.shape == fitted.sparse[name].shape
            assert torch.equal(weight == 0, fitted.sparse[name] == 0), name
        assert any(not torch.equal(weight, fitted.sparse[name]) for name, weight in fitted.found.items())
        assert fitted.error(fitted.found, LAST) < 0.95 * fitted.error(fitted.sparse, LAST)
        assert unchanged(fitted.model, fitted.before)
        assert all(p.grad is None and p.requires_grad for p in fitted.model.parameters())

    def test_where_every_epoch_is_worse_the_weights_stay(self, family, ids):
        fitted = Fitted(family, ids, rate=1e3)
        assert all(torch.equal(weight, fitted.sparse[name]) for name, weight in fitted.found.items())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "llama4_text"])
class TestAddedZeros:
    def test_the_zeros_of_a_plan_are_added_to_those_that_were_there(self, family, ids):
        fitted = Fitted(family, ids, plan=0.7)
        shared = [p.name for p in fitted.block.pruned if p.expert is None]
        pools = [shared, *([p.name] for p in fitted.block.pruned if p.expert is not None)]
        for pool in pools:
            zeros = torch.cat([(fitted.found[name] == 0).flatten() for name in pool])
            assert int(zeros.sum()) == pytest.approx(0.7 * len(zeros), abs=len(pool)), pool
        shares = {name: float((fitted.found[name] == 0).float().mean()) for name in shared}
        assert max(shares.values()) > 0.71 and min(shares.values()) < 0.69, "one gets more of them than another"
        for name, weight in fitted.found.items():
            zero = weight == 0
            assert zero[fitted.sparse[name] == 0].all() and not (weight.signbit() & zero).any(), name

    def test_it_is_better_to_add_them_step_by_step(self, family, ids):
        at_once = Fitted(family, ids, plan=0.7, rate=1e3)
        fitted = Fitted(family, ids, plan=0.7)
        zeros, weights = ([f(w) for w in at_once.found.values()] for f in (lambda w: int((w == 0).sum()), torch.numel))
        assert sum(zeros) == pytest.approx(0.7 * sum(weights), abs=len(weights))
        assert fitted.error(fitted.found, LAST) < 0.95 * fitted.error(at_once.found, LAST)

    def test_projections_of_another_sparsity_do_not_share_zeros(self, family, ids):
        fitted = Fitted(family, ids)
        plan = Plan({p.name: 0.7 + 0.02 * place for place, p in enumerate(fitted.block.pruned)})
        with torch.no_grad():
            found = fitted.refit.fit(*fitted.given(), plan)
        for name, weight in found.items():
            assert int((weight == 0).sum()) == pytest.approx(plan.sparsity[name] * weight.numel(), abs=1), name

    def test_rows_have_their_own_shares(self, family, ids):
        fitted = Fitted(family, ids)
        shares = {p.name: torch.linspace(0.5, 0.9, p.shape[0], dtype=torch.float64) for p in fitted.block.pruned}
        with torch.no_grad():
            found = fitted.refit.fit(*fitted.given(), Plan(shares))
        for name, weight in found.items():
            there = (fitted.sparse[name] == 0).sum(dim=1)
            assert torch.equal((weight == 0).sum(dim=1), row_counts(shares[name], weight.shape).maximum(there)), name


def test_curvature_has_the_mean_rows_and_columns_of_the_gauss_newton_matrix(ids):
    """Against its exact diagonal, the summed squares of a Jacobian, on one short sequence."""
    fitted = Fitted("llama", ids[:, :4], epochs=1)
    block, changes, energies, inputs, expected, calls = fitted.given()
    weights, draws = _Weights(block, changes, energies, torch.float32, None), 300
    batch = next(iter(inputs))[:1], next(iter(expected))[:1], calls[0]
    found = weights.curvature(block, [batch] * draws)
    sizes = batch[1].square().sum(dim=-1, keepdim=True).sqrt()
    for p in block.pruned:
        place = weights.places[p.owner]

        def relative(master, place=place):
            weights.masters[place] = master
            return weights.run(block, batch[0], batch[2]) / sizes

        own = weights.masters[place]
        jacobian = torch.autograd.functional.jacobian(relative, own.detach())
        weights.masters[place] = own
        exact = jacobian.flatten(0, -own.ndim - 1).square().sum(dim=0)
        for dim in (0, 1):
            assert torch.allclose(found[p.name].mean(dim) / draws, p.view(exact).mean(dim), rtol=0.3), p.name


def test_an_expert_without_tokens_is_pruned_by_the_size_of_its_weights():
    assert _product(torch.zeros(2), torch.zeros(3)).unique().numel() == 1
    assert _product(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).min() > 0


def test_products_are_computed_in_the_dtype_of_the_refit(ids, monkeypatch):
    seen, run = {}, _Weights.run

    def spied(self, block, states, call):
        with block.module.mlp.gate_proj.register_forward_hook(lambda _module, _args, out: seen[dtype].add(out.dtype)):
            output = run(self, block, states, call)
        assert output.dtype == torch.float32, "of the residual stream"
        return output

    monkeypatch.setattr(_Weights, "run", spied)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        seen[dtype] = set()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):  # the caller's changes nothing
            found[dtype] = Fitted("llama", ids, epochs=1, dtype=dtype).found
        assert seen[dtype] == {dtype} and {weight.dtype for weight in found[dtype].values()} == {torch.float32}
    assert all(not torch.equal(one, other) for one, other in zip(*(own.values() for own in found.values())))


def test_the_best_epoch_is_kept_and_not_the_last(ids, monkeypatch):
    """Of three epochs the first is said to be best: what is kept is what the weights were then."""
    taken, original = [], _Weights.snapshot

    def spied(self):
        own = original(self)
        taken.append([weight.clone() for weight in own])  # as it is now, whatever later epochs do
        return own

    monkeypatch.setattr(_Weights, "snapshot", spied)
    errors = iter([4.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr("optimum_neuronal.pruning.refit._error", lambda *_args: next(errors))
    found = Fitted("llama", ids, epochs=3).found
    assert len(taken) == 2, "as it was, and after the first epoch"
    assert all(torch.equal(weight, own) for weight, own in zip(found.values(), taken[1]))
    assert not any(torch.equal(weight, own) for weight, own in zip(*taken))


def test_steps_of_columns_are_inverse_to_their_inputs():
    kept = torch.tensor([[True, True, True], [True, False, False]])
    steps = column_steps(torch.tensor([1.0, 4.0, 16.0]), kept)
    assert torch.equal(steps > 0, kept) and float(steps[kept].square().mean()) == pytest.approx(1)
    assert float(steps[0, 0] / steps[0, 1]) == pytest.approx(2, rel=0.03), "but for what is added to all energies"
    assert torch.equal(steps[0, 0], steps[1, 0])
    assert column_steps(torch.tensor([1.0, 0.0, 0.0]), kept).max() < 3, "a column without inputs"
    assert torch.equal(column_steps(torch.zeros(3), kept), kept.float()), "no column has any"
    assert not column_steps(torch.ones(3), torch.zeros_like(kept)).any(), "nothing is kept"


def test_the_error_of_each_token_is_relative_to_its_size():
    expected = torch.tensor([[[1.0, 0.0], [1000.0, 0.0]], [[0.0, 0.5], [0.0, 0.5]]])
    outputs = torch.tensor([[[0.0, 0.0], [1000.0, 0.0]], [[0.0, 0.5], [0.5, 0.5]]])
    assert float(relative_error(outputs, expected)) == pytest.approx(0.5), (
        "two of four tokens are off by their own size"
    )


@pytest.fixture
def last_epoch(monkeypatch):
    """Every epoch counts as better than the one before: random tokens have little to learn from."""
    numbers = count()
    monkeypatch.setattr("optimum_neuronal.pruning.refit._error", lambda *_args: -next(numbers))


@pytest.mark.usefixtures("last_epoch", "batched")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_all_but_projections_stays_and_batches_change_no_bit(family, method, ids):
    refitted, again, one_by_one, dense = (make_model(family) for _ in range(4))
    pruner = prune(refitted, ids, **METHODS[method], batch_size=5)
    for model, batch_size in ((again, 5), (one_by_one, 1)):
        prune(model, ids, **METHODS[method], batch_size=batch_size)
        assert unchanged(model, state(refitted))
    own, original = find_decoder(refitted).projections, find_decoder(dense).projections
    for block in find_decoder(refitted).blocks:
        zeros = sum(int((p.weight == 0).sum()) for p in block.pruned)
        assert zeros == pytest.approx(0.6 * sum(p.numel for p in block.pruned), abs=len(block.pruned))
    assert pruner.report.achieved_sparsity == pytest.approx(0.6, abs=2e-3)
    owners = {id(projection.owner) for projection in own.values()}
    pairs = zip(refitted.named_parameters(), dense.parameters())
    rest = [(name, one, other) for (name, one), other in pairs if id(one) not in owners]
    assert rest and all(torch.equal(one, other) for _, one, other in rest), "norms, biases, embeddings"
    assert all(one.shape == other.weight.shape for one, other in zip(own.values(), original.values()))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in refitted.parameters())


@pytest.mark.usefixtures("last_epoch")
def test_a_pattern_keeps_its_zeros(ids):
    plain, refitted = make_model("llama"), make_model("llama")
    for model, epochs in ((plain, 0), (refitted, 2)):
        NeuronALPruner(NeuronALConfig.preset("two-four", **FIELDS, refit_epochs=epochs)).prune(model, ids)
    projections, own = (find_decoder(model).projections for model in (plain, refitted))
    first = [name for name in projections if ".0." in name]  # later blocks have other inputs and other zeros
    assert all(torch.equal(projections[name].weight == 0, own[name].weight == 0) for name in first)
    assert any(not torch.equal(projections[name].weight, own[name].weight) for name in first)


def test_what_a_block_should_put_out(ids, monkeypatch):
    """The dense model's own output, not what the dense block makes of the sparse model's hidden states."""
    dense, seen, fit = make_model("llama"), [], Refit.fit

    def spied(self, block, changes, energies, inputs, expected, calls, plan):
        made = [block.module(states, *call.args, **call.kwargs) for states, call in zip(inputs, calls)]
        seen.append((torch.cat(list(expected)), torch.cat(made)))
        return fit(self, block, changes, energies, inputs, expected, calls, plan)

    monkeypatch.setattr(Refit, "fit", spied)
    prune(make_model("llama"), ids)
    outputs = []
    for layer in dense.model.layers:
        layer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    with torch.no_grad():
        dense(ids)
    for (expected, made), own in list(zip(seen, outputs))[1:]:
        assert torch.allclose(expected, own, atol=1e-4) and not torch.allclose(expected, made, atol=1e-4)


def test_float16_gradients_do_not_underflow(ids, monkeypatch):
    """Large hidden states have small gradients. Without the scale, nothing would be fitted."""

    def fitted(scale):
        monkeypatch.setattr("optimum_neuronal.pruning.refit.FLOAT16_SCALE", scale)
        model = make_model("llama")
        model.model.embed_tokens.weight.data *= 1000
        prune(model.half(), ids)
        return model.model.layers[0].mlp.up_proj.weight

    assert torch.equal(fitted(1.0), fitted(0.0)) and not torch.equal(fitted(2.0**16), fitted(0.0))


def test_a_token_without_output_hides_no_curvature_in_float16(ids):
    model, fitted = make_model("llama").half(), {}
    model.model.embed_tokens.weight.data[0], ids[:, 0] = 0, 0
    for dtype in (torch.float32, torch.float16):
        own = copy.deepcopy(model).to(dtype)
        prune(own, ids, topup="uniform")
        fitted[dtype] = find_decoder(own).blocks[0]
    shares = {dtype: [float((p.weight == 0).float().mean()) for p in own.pruned] for dtype, own in fitted.items()}
    assert shares[torch.float16] == pytest.approx(shares[torch.float32], abs=0.02)


def test_no_row_loses_more_at_first_than_in_the_end():
    """Shares of a plan's counts would round to whole weights in other rows."""
    projections = find_decoder(make_model("llama")).blocks[0].pruned
    plan = Plan({p.name: torch.full((p.shape[0],), 0.05, dtype=torch.float64) for p in projections})
    first = first_zeros(plan, projections)
    for p in projections:
        some, all_of_them = (row_counts(own.amounts[p.name], p.shape) for own in (first, plan))
        assert (some <= all_of_them).all() and 0 < some.sum() < all_of_them.sum()


@lru_cache
def trained():
    """The first two blocks of the reference model, and sequences to calibrate and to test on."""
    model = authors.load_model()
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    return model, authors.load_ids("calibration_ids")[:32], authors.load_ids("test_ids_python")[:8]


def test_outputs_come_nearer_to_the_dense_models():
    """Of sequences that it has not seen: hidden states, which it fits, and next-token distributions."""
    dense, ids, test_ids = trained()
    fields = {"topup": "uniform", "num_samples": len(ids), "num_alignment_samples": 4}
    config = NeuronALConfig(0.7, "sparsegpt", **fields, refit_learning_rate=0.04)
    hidden, divergence = [], []
    for epochs in (0, 3):
        model = copy.deepcopy(dense)
        NeuronALPruner(replace(config, refit_epochs=epochs)).prune(model, ids)
        with torch.no_grad():
            ours, theirs = (m(test_ids, output_hidden_states=True) for m in (model, dense))
        hidden.append((ours.hidden_states[1] - theirs.hidden_states[1]).square().mean().item())
        ours, theirs = (output.logits.log_softmax(dim=-1) for output in (ours, theirs))
        divergence.append((theirs.exp() * (theirs - ours)).sum(dim=-1).mean().item())
    assert hidden[1] < 0.95 * hidden[0] and divergence[1] < 0.97 * divergence[0]


def test_an_epoch_that_has_not_all_zeros_yet_is_never_kept(ids, monkeypatch):
    """Each epoch is said to be worse than the one before: the first that counts has all zeros of the plan."""
    errors = iter([9.0, 1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr("optimum_neuronal.pruning.refit._error", lambda *_args: next(errors))
    fitted = Fitted("llama", ids, plan=0.7)
    zeros = torch.cat([(weight == 0).flatten() for weight in fitted.found.values()])
    assert int(zeros.sum()) == pytest.approx(0.7 * len(zeros), abs=len(fitted.found))
    assert next(errors) == 4.0, "of four epochs the first was not measured"


def test_the_held_out_sequences_are_only_measured(ids, monkeypatch):
    """No step reads the last batch, which chooses the best epoch."""
    read, original = [], _Weights.step

    def spied(self, optimizer, block, batch):
        read.append(batch[0])
        return original(self, optimizer, block, batch)

    monkeypatch.setattr(_Weights, "step", spied)
    batches = Fitted("llama", ids, epochs=2).inputs.batches
    assert [sum(one is batch for one in read) for batch in batches] == [*[2] * (len(batches) - 1), 0]
