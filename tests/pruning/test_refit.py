"""Refit: what it may change, what it must leave, and that it never makes a block worse."""

import copy
from dataclasses import replace
from itertools import count

import pytest
import torch
from conftest import make_model, memory_of
from trial_helpers import build_evaluator, same_state, state, unchanged

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.block_inputs import Stream
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.change import NewWeight
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import trial_weights
from optimum_neuronal.pruning import prepare as preparing
from optimum_neuronal.pruning import refit as module
from optimum_neuronal.pruning.refit import Refit, _product, _Weights, column_steps, first_zeros, relative_error
from optimum_neuronal.saliency.plan import Plan, row_counts
from optimum_neuronal.saliency.sparsegpt import SparseGPT


FIELDS = {"topup": "uniform", "num_samples": 16, "num_alignment_samples": 4, "min_expert_tokens": 1}
SPARSEGPT = {"saliency": "sparsegpt"}
ALPS = {"saliency": "alps", "saliency_args": {"iterations": 9}}
FAMILIES = pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "llama4_text"])


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids of 16 sequences: two batches, the second of which is held out."""
    return torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(1))


def config(**fields):
    fields = {**FIELDS, **SPARSEGPT, "refit_epochs": 2, "refit_learning_rate": 0.04, **fields}
    return NeuronALConfig(**{"sparsity": 0.6, **fields})


def prune(model, ids, **fields):
    memory, pruner = memory_of(fields), NeuronALPruner(config(**fields))
    pruner.prune(model, ids, **memory)
    return pruner.report


class Fitted:
    """A block, half of whose weights were pruned at random, and its weights after a refit.

    `plan` is a larger sparsity that the refit reaches, or a function of a projection's place and shape that returns it.
    """

    def __init__(self, family, ids, epochs=4, rate=0.2, dtype=torch.float32, plan=None, importance=None):
        self.model, self.refit = make_model(family), Refit(epochs, rate, dtype)
        self.before = state(self.model)
        with inference(self.model):
            evaluator = build_evaluator(find_decoder(self.model), SparseGPT(), ids, len(ids))
            inputs, self.runner = evaluator.alignment_inputs(), evaluator.runner
            self.block, self.inputs, self.calls = evaluator.decoder.blocks[0], Stream(inputs.hidden), inputs.calls[0]
            self.expected = self.runner.output(self.block, self.inputs, self.calls)
            self.sparse = {p.name: self.half(p) for p in self.block.pruned}
            of_place = plan if callable(plan) else lambda place, shape: plan
            sparsities = {p.name: of_place(place, p.shape) for place, p in enumerate(self.block.pruned)}
            self.plan = None if plan is None else Plan(sparsities)
            if importance is not None:
                self.refit = replace(self.refit, importance={self.block.name: importance})
            fitted = self.refit.fit(*self.given(), self.plan)
            self.weights = {name: change.weight for name, change in fitted.items()}

    @staticmethod
    def half(projection) -> torch.Tensor:
        kept = torch.rand(projection.shape, generator=torch.Generator().manual_seed(3)) < 0.5
        return torch.where(kept, projection.weight, 0)

    def given(self):
        changes = {name: NewWeight(weight) for name, weight in self.sparse.items()}
        norms = self.runner.replay(self.block, self.inputs, self.calls)[1]
        return self.block, changes, norms, self.inputs, self.expected, self.calls

    def zeros(self, name) -> int:
        return int((self.weights[name] == 0).sum())

    def held_out_error(self, weights, features=slice(None)) -> float:
        """Mean squared error of these features of the block's output on the last batch."""
        with inference(self.model), trial_weights(self.block.pruned, lambda p: NewWeight(weights[p.name])):
            output = self.runner.output(self.block, self.inputs, self.calls)
        return float((output.batches[-1] - self.expected.batches[-1])[..., features].square().mean())


@FAMILIES
class TestFit:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_zeros_and_the_model_stay_and_the_held_out_error_falls(self, family, ids, dtype):
        fitted = Fitted(family, ids, dtype=dtype)
        for name, weight in fitted.weights.items():
            assert torch.equal(weight == 0, fitted.sparse[name] == 0), name
        assert any(not torch.equal(weight, fitted.sparse[name]) for name, weight in fitted.weights.items())
        assert fitted.held_out_error(fitted.weights) < 0.95 * fitted.held_out_error(fitted.sparse)
        assert unchanged(fitted.model, fitted.before)
        assert all(p.grad is None and p.requires_grad for p in fitted.model.parameters())

    def test_where_every_epoch_is_worse_the_weights_stay(self, family, ids):
        fitted = Fitted(family, ids, rate=1e3)
        assert all(torch.equal(weight, fitted.sparse[name]) for name, weight in fitted.weights.items())


@FAMILIES
class TestAddedZeros:
    def test_they_are_shared_by_projections_of_equal_sparsity_and_better_added_step_by_step(self, family, ids):
        fitted, at_once = (Fitted(family, ids, plan=0.7, rate=rate) for rate in (0.2, 1e3))
        shared = [p.name for p in fitted.block.pruned if p.expert is None]
        for pool in [shared, *([p.name] for p in fitted.block.pruned if p.expert is not None)]:
            size = sum(fitted.weights[name].numel() for name in pool)
            for each in (fitted, at_once):
                assert sum(map(each.zeros, pool)) == pytest.approx(0.7 * size, abs=len(pool)), pool
        shares = [fitted.zeros(name) / fitted.weights[name].numel() for name in shared]
        assert max(shares) > 0.71 and min(shares) < 0.69, "one gets more of them than another"
        for name, weight in fitted.weights.items():
            zero = weight == 0
            assert zero[fitted.sparse[name] == 0].all() and not (weight.signbit() & zero).any(), name
        assert fitted.held_out_error(fitted.weights) < 0.95 * at_once.held_out_error(at_once.weights)

    def test_projections_of_another_sparsity_do_not_share_zeros(self, family, ids):
        fitted = Fitted(family, ids, plan=lambda place, shape: 0.7 + 0.02 * place)
        for name, weight in fitted.weights.items():
            assert fitted.zeros(name) == pytest.approx(fitted.plan.sparsity[name] * weight.numel(), abs=1), name

    def test_rows_have_their_own_shares(self, family, ids):
        def by_row(place, shape):
            return torch.linspace(0.5, 0.9, shape[0], dtype=torch.float64)

        fitted = Fitted(family, ids, plan=by_row)
        for name, weight in fitted.weights.items():
            expected = row_counts(fitted.plan.sparsity[name], weight.shape).maximum((fitted.sparse[name] == 0).sum(1))
            assert torch.equal((weight == 0).sum(dim=1), expected), name


def test_no_row_loses_more_at_first_than_in_the_end():
    """Shares of a plan's counts would round to whole weights in other rows."""
    projections = find_decoder(make_model("llama")).blocks[0].pruned
    plan = Plan({p.name: torch.full((p.shape[0],), 0.05, dtype=torch.float64) for p in projections})
    first = first_zeros(plan, projections)
    for p in projections:
        some, all_of_them = (row_counts(each.sparsity[p.name], p.shape) for each in (first, plan))
        assert (some <= all_of_them).all() and 0 < some.sum() < all_of_them.sum()


def test_curvature_has_the_mean_rows_and_columns_of_the_gauss_newton_matrix(ids):
    """Against its exact diagonal, the summed squares of a Jacobian, on one short sequence."""
    fitted = Fitted("llama", ids[:, :4], epochs=1)
    block, changes, norms, inputs, expected, calls = fitted.given()
    importance, draws = torch.linspace(0.5, 1.5, 32), 300
    weights = _Weights(block, changes, norms, torch.float32, importance, None)
    batch = next(iter(inputs))[:1], next(iter(expected))[:1], calls[0]
    curvature = weights.curvature(block, [batch] * draws)
    sizes = batch[1].square().sum(dim=-1, keepdim=True).sqrt()
    for p in block.pruned:
        place = weights.places[p.owner]

        def relative(master, place=place):
            weights.masters[place] = master
            return importance.sqrt() * weights.run(block, batch[0], batch[2]) / sizes

        own = weights.masters[place]
        jacobian = torch.autograd.functional.jacobian(relative, own.detach())
        weights.masters[place] = own
        exact = jacobian.flatten(0, -own.ndim - 1).square().sum(dim=0)
        for dim in (0, 1):
            assert torch.allclose(curvature[p.name].mean(dim) / draws, p.view(exact).mean(dim), rtol=0.3), p.name


def test_an_expert_without_tokens_is_pruned_by_the_size_of_its_weights():
    assert _product(torch.zeros(2), torch.zeros(3)).unique().numel() == 1
    assert _product(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).min() > 0


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
    assert float(relative_error(outputs, expected)) == pytest.approx(0.5), "two of four are off by their own size"
    importance = torch.tensor([0.5, 1.5])
    assert float(relative_error(outputs, expected, importance)) == pytest.approx(0.25), "both by their first feature"


@pytest.mark.parametrize("plan", [None, 0.7])
def test_features_of_more_importance_are_fitted_better(plan, ids):
    important, errors = torch.cat([torch.full((8,), 4.0), torch.zeros(24)]), []
    for importance in (None, important):
        fitted = Fitted("llama", ids, plan=plan, importance=importance)
        errors.append([fitted.held_out_error(fitted.weights, part) for part in (slice(8), slice(8, None))])
    assert errors[1][0] < errors[0][0] and errors[1][1] > errors[0][1]


class TestEpochs:
    @pytest.fixture
    def snapshots(self, monkeypatch):
        """Copies of the weights whenever they were the best."""
        taken, snapshot = [], _Weights.snapshot

        def spied(self):
            best = snapshot(self)
            taken.append([weight.clone() for weight in best])  # as it is now, whatever later epochs do
            return best

        monkeypatch.setattr(_Weights, "snapshot", spied)
        return taken

    def test_the_best_is_kept_and_not_the_last(self, ids, snapshots, monkeypatch):
        errors = iter([4.0, 1.0, 2.0, 3.0])  # before and after each of three epochs
        monkeypatch.setattr(module, "_error", lambda *_args: next(errors))
        weights = Fitted("llama", ids, epochs=3).weights
        before, first = snapshots
        assert all(torch.equal(weight, own) for weight, own in zip(weights.values(), first))
        assert not any(torch.equal(weight, own) for weight, own in zip(before, first))

    def test_one_that_has_not_all_zeros_yet_is_never_kept(self, ids, monkeypatch):
        errors = iter([9.0, 1.0, 2.0, 3.0, 4.0])
        monkeypatch.setattr(module, "_error", lambda *_args: next(errors))
        fitted = Fitted("llama", ids, plan=0.7)
        size = sum(weight.numel() for weight in fitted.weights.values())
        assert sum(map(fitted.zeros, fitted.weights)) == pytest.approx(0.7 * size, abs=len(fitted.weights))
        assert next(errors) == 4.0, "of four epochs the first was not measured"

    def test_the_held_out_sequences_are_only_measured(self, ids, monkeypatch):
        read, step = [], _Weights.step

        def spied(self, optimizer, block, batch):
            read.append(batch[0])
            return step(self, optimizer, block, batch)

        monkeypatch.setattr(_Weights, "step", spied)
        batches = Fitted("llama", ids, epochs=2).inputs.batches
        assert [sum(one is batch for one in read) for batch in batches] == [*[2] * (len(batches) - 1), 0]


class TestDtype:
    def test_it_is_bfloat16_where_the_cpu_multiplies_it_faster(self, llama, ids, monkeypatch):
        def chosen(model=llama, **fields):
            decoder = find_decoder(model)
            return preparing.find_refit_dtype(config(**fields), decoder)

        monkeypatch.setattr(preparing, "multiplies_bfloat16", lambda device: True)
        assert chosen() == "float32", "a narrow model would gain little"
        monkeypatch.setattr(preparing, "BFLOAT16_WIDTH", 32)
        assert chosen() == "bfloat16" and chosen(refit_dtype="float32") == "float32"
        report = prune(make_model("llama"), ids)
        assert report.config["refit_dtype"] == "bfloat16", "so that another machine repeats the prune"
        half = make_model("llama").bfloat16()
        assert chosen(half) is None and chosen(half, refit_dtype="bfloat16") is None, "without autocast"
        with pytest.raises(ValueError, match="refit_dtype is 'float32', but the weights are bfloat16: leave it out"):
            chosen(half, refit_dtype="float32")
        monkeypatch.setattr(preparing, "multiplies_bfloat16", lambda device: False)
        assert chosen() == "float32" and chosen(refit_dtype="bfloat16") == "bfloat16"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_products_are_computed_in_it(self, dtype, ids):
        fitted, dtypes = Fitted("llama", ids, epochs=1), set()
        gate, given = fitted.block.module.mlp.gate_proj, fitted.given()
        callers = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32)  # changes nothing
        with gate.register_forward_hook(lambda _module, _args, output: dtypes.add(output.dtype)), callers:
            changes = replace(fitted.refit, dtype=dtype).fit(*given)
        assert dtypes == {dtype} and {change.weight.dtype for change in changes.values()} == {torch.float32}

    def test_float16_gradients_do_not_underflow(self, ids, monkeypatch):
        """Large hidden states have small gradients. Without the scale, nothing would be fitted."""

        def fitted(scale):
            monkeypatch.setattr(module, "FLOAT16_SCALE", scale)
            model = make_model("llama")
            model.model.embed_tokens.weight.data *= 1000
            prune(model.half(), ids)
            return model.model.layers[0].mlp.up_proj.weight

        assert torch.equal(fitted(1.0), fitted(0.0)) and not torch.equal(fitted(2.0**16), fitted(0.0))

    def test_a_token_without_output_hides_no_curvature_in_float16(self, ids):
        model, shares = make_model("llama").half(), []
        ids = ids.clamp(min=1)  # two zeros at the beginning would be padding
        model.model.embed_tokens.weight.data[0], ids[:, 0] = 0, 0
        for dtype in (torch.float32, torch.float16):
            own = copy.deepcopy(model).to(dtype)
            prune(own, ids)
            shares.append([float((p.weight == 0).float().mean()) for p in find_decoder(own).blocks[0].pruned])
        assert shares[1] == pytest.approx(shares[0], abs=0.02)


@pytest.fixture
def last_epoch(monkeypatch):
    """Every epoch counts as better than the one before: random tokens have little to learn from."""
    numbers = count()
    monkeypatch.setattr(module, "_error", lambda *_args: -next(numbers))


@pytest.mark.usefixtures("last_epoch", "batched")
@pytest.mark.parametrize("method", [ALPS, SPARSEGPT], ids=["alps", "sparsegpt"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_all_but_projections_stays_and_batches_change_no_bit(family, method, ids):
    refitted, one_by_one, dense = (make_model(family) for _ in range(3))
    assert prune(refitted, ids, **method, batch_size=5).achieved_sparsity == pytest.approx(0.6, abs=2e-3)
    prune(one_by_one, ids, **method, batch_size=1)
    assert same_state(one_by_one, refitted.state_dict())
    decoder = find_decoder(refitted)
    for block in decoder.blocks:
        zeros = sum(int((p.weight == 0).sum()) for p in block.pruned)
        assert zeros == pytest.approx(0.6 * block.numel, abs=len(block.pruned))
    owners = {id(projection.owner) for projection in decoder.projections.values()}
    rest = [(own, other) for own, other in zip(refitted.parameters(), dense.parameters()) if id(own) not in owners]
    assert rest and all(torch.equal(own, other) for own, other in rest), "norms, biases, embeddings"
    assert all(parameter.grad is None and parameter.requires_grad for parameter in refitted.parameters())


@pytest.mark.usefixtures("last_epoch")
def test_a_pattern_keeps_its_zeros(ids):
    plain, refitted = make_model("llama"), make_model("llama")
    for model, epochs in ((plain, 0), (refitted, 2)):
        NeuronALPruner(NeuronALConfig.preset("two-four", **FIELDS, refit_epochs=epochs)).prune(model, ids)
    # Later blocks have other inputs.
    first, second = (find_decoder(model).blocks[0].pruned for model in (plain, refitted))
    assert all(torch.equal(a.weight == 0, b.weight == 0) for a, b in zip(first, second))
    assert any(not torch.equal(a.weight, b.weight) for a, b in zip(first, second))


def test_what_a_block_should_put_out(ids, monkeypatch):
    """The dense model's own output, not what the dense block makes of the sparse model's hidden states."""
    dense, seen, outputs, fit = make_model("llama"), [], [], Refit.fit

    def spied(self, block, changes, norms, inputs, expected, calls, plan):
        made = [block.module(states, *call.args, **call.kwargs) for states, call in zip(inputs, calls)]
        seen.append((torch.cat(list(expected)), torch.cat(made)))
        assert float(self.importance[block.name].std()) > 0.05, "it knows what the later norms weigh"
        return fit(self, block, changes, norms, inputs, expected, calls, plan)

    monkeypatch.setattr(Refit, "fit", spied)
    prune(make_model("llama"), ids)
    for layer in dense.model.layers:
        layer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    with torch.no_grad():
        dense(ids)
    for (expected, made), own in list(zip(seen, outputs))[1:]:
        assert torch.allclose(expected, own, atol=1e-4) and not torch.allclose(expected, made, atol=1e-4)
