from types import SimpleNamespace

import pytest
import torch
from by_hand import mean
from conftest import make_model
from sweeps import build_sweep

from optimum_neuronal.decoder.finding import find_decoder
from optimum_neuronal.engine.capture import inference
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup.search import FIRST_STEP, LAST_STEP, Search, _Run
from optimum_neuronal.topup.search_space import Space


class FakeSweep:
    """A bowl: the error is the squared distance from a plan that the search does not know."""

    def __init__(self, decoder, wanted, saliency="wanda"):
        self.decoder, self.wanted, self.saliency = decoder, wanted, SALIENCIES.get(saliency)()
        self.engine = SimpleNamespace(levels=None)
        self.asked = 0

    def solve_levels(self, target):
        self.engine.levels = target

    def output_errors(self, plans, metric, label, reference):
        self.asked += len(plans)
        errors = []
        for plan in plans:
            means = {name: torch.as_tensor(value, dtype=torch.float64).mean() for name, value in plan.sparsity.items()}
            errors.append(sum(float(means[name] - value) ** 2 for name, value in self.wanted.items()))
        return errors

    def row_saliency(self, plan, label):
        return {name: torch.arange(p.shape[0]).double() for name, p in self.decoder.projections.items()}


def test_it_finds_a_shift_between_kinds(llama):
    """The known best plan spares down projections, and late blocks less than early ones."""
    decoder = find_decoder(llama)
    space = Space.of(decoder, 0.7)
    wanted = space.on_target(space.uniform + 0.1 * space.depth - 0.12 * space.kinds["down"])
    sweep = FakeSweep(decoder, dict(zip(space.names, wanted.tolist())))
    start = sweep.output_errors([space.plan(space.uniform)], "kl", None, "dense")[0]
    allocation = Search(rows=False).allocate(sweep, 0.7)
    (end,) = sweep.output_errors([allocation.plan], "kl", None, "dense")
    assert end < 0.15 * start
    found = torch.tensor([allocation.plan.sparsity[name] for name in space.names], dtype=torch.float64)
    assert mean(space, found) == pytest.approx(0.7, abs=1e-9)
    assert (found * space.kinds["down"]).sum() < (space.uniform * space.kinds["down"]).sum()


def test_a_plan_is_only_ever_replaced_by_a_better_one(llama):
    decoder = find_decoder(llama)
    space = Space.of(decoder, 0.7)
    sweep = FakeSweep(decoder, dict(zip(space.names, space.uniform.tolist())))
    stages = Search().allocate(sweep, 0.7).decisions["search"]["stages"]
    ends = [stage["ended"] for stage in stages if "ended" in stage]
    assert ends == sorted(ends, reverse=True) and all(s["ended"] <= s["began"] for s in stages if "ended" in s)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize(("budget", "objective"), [(8, "kl"), (25, "nll"), (58, "kl"), (90, "kl"), (40, "alignment")])
def test_the_budget_is_what_it_costs(family, budget, objective, ids):
    """One unit is one pass of the alignment sequences through all blocks, counted by the engine."""
    model = make_model(family)
    with inference(model):
        sweep = build_sweep(find_decoder(model), SALIENCIES.get("wanda")(), ids, 4, 4)
        allocation = Search(budget=budget, objective=objective).allocate(sweep, 0.6)
    spent = allocation.decisions["search"]["spent"]
    assert spent <= budget
    assert sweep.engine.runner.block_forwards <= 4 * len(sweep.decoder.blocks) * spent, (
        "less where candidates share blocks"
    )
    assert sweep.engine.runner.block_forwards >= 0.7 * 4 * len(sweep.decoder.blocks) * spent


def test_the_error_falls_on_a_real_model(ids):
    model = make_model("llama")
    with inference(model):
        sweep = build_sweep(find_decoder(model), SALIENCIES.get("wanda")(), ids, 4, 4)
        allocation = Search().allocate(sweep, 0.6)
        uniform = Space.of(sweep.decoder, 0.6)
        plans = [uniform.plan(uniform.uniform), allocation.plan]
        dense, found = sweep.output_errors(plans, "kl", None, "sparse-stream")
    assert found < dense


def test_one_block_or_one_projection():
    one = find_decoder(make_model("llama", num_hidden_layers=1))
    space = Space.of(one, 0.7)
    assert not any("depth" in name or "block" in name for name in space.directions(1))
    allocation = Search().allocate(FakeSweep(one, dict(zip(space.names, space.uniform.tolist()))), 0.7)
    assert set(allocation.plan.sparsity) == set(space.names)
    single = find_decoder(make_model("llama", num_hidden_layers=1), targets=["down_proj"])
    assert set(Search().allocate(FakeSweep(single, {}), 0.7).plan.sparsity.values()) == {0.7}


def test_a_saliency_that_updates_weights_gets_no_sparsity_by_row(llama):
    decoder = find_decoder(llama)
    for saliency, by_row in (("sparsegpt", False), ("wanda", True)):
        plan = Search().allocate(FakeSweep(decoder, {"model.layers.0.mlp.down_proj": 0.6}, saliency), 0.7).plan
        stages = Search().allocate(FakeSweep(decoder, {}, saliency), 0.7).decisions["search"]["stages"]
        assert ("rows" in [stage["stage"] for stage in stages]) == by_row
        if not by_row:
            assert all(isinstance(value, float) for value in plan.sparsity.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 3}, "budget is 3: expected a whole number of at least 8"),
        ({"objective": "kll"}, "Did you mean 'kl'"),
        ({"rows": 1}, "rows is 1: expected True or False"),
        ({"widths": (2.0,)}, "widths is 2.0"),
        ({"widths": ()}, "widths is empty"),
    ],
)
def test_bad_hyper_parameters(arguments, message):
    with pytest.raises(ValueError, match=message):
        Search(**arguments)


def test_the_step_follows_the_line(llama):
    space = Space.of(find_decoder(llama), 0.7)
    run = _Run(None, space, "kl", 58)
    run.adapt_step([3.0, 2.0, 1.0], before=2.5)
    assert run.steps == [pytest.approx(1.4 * FIRST_STEP), FIRST_STEP]
    run.adapt_step([1.0, 2.0, 3.0], before=2.5)
    assert run.steps[0] == pytest.approx(0.7 * 1.4 * FIRST_STEP)
    run.adapt_step([3.0, 3.0, 3.0], before=2.5)
    assert run.steps[0] == pytest.approx(0.4 * 0.7 * 1.4 * FIRST_STEP)
    run.rounds = 1
    for _ in range(20):
        run.adapt_step([3.0, 3.0, 3.0], before=2.5)
    assert run.steps[1] == LAST_STEP


def test_a_round_that_is_too_expensive_makes_way_for_one_that_is_not(llama):
    space = Space.of(find_decoder(llama), 0.7)
    run = _Run(None, space, "kl", 58)
    cheap, dear = run.cost_of_round(0), run.cost_of_round(1)
    assert cheap < dear
    run.rounds = 1
    assert run.skips_to_a_round_within(dear) and run.rounds == 1
    assert run.skips_to_a_round_within(cheap) and run.rounds == 2
    assert not run.skips_to_a_round_within(cheap - 0.5)
    run.spent = 10.0
    assert not run.skips_to_a_round_within(cheap)
