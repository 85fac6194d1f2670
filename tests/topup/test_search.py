import pytest
import torch
from by_hand import mean
from conftest import make_model, memory_of
from profiles import at_night
from sweeps import build_sweep, state, unchanged
from transformers import AutoModelForCausalLM

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.engine.capture import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.topup.search import FIRST_STEP, LAST_STEP, Search, _Run
from optimum_neuronal.topup.search_space import Space


class FakeSweep:
    """A bowl: the error is the squared distance from a plan that the search does not know."""

    def __init__(self, decoder, wanted, saliency="wanda"):
        self.decoder, self.wanted, self.saliency = decoder, wanted, SALIENCIES.get(saliency)()
        self.asked = 0
        self.solved = None

    def solve_levels(self, target):
        self.solved = target
        return "levels"

    def output_errors(self, plans, metric, label, reference):
        assert (reference == "levels") == (self.solved is not None) or label is None
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
@pytest.mark.parametrize(
    ("budget", "objective"),
    [(8, "kl"), (25, "nll"), (58, "kl"), pytest.param(90, "kl", marks=at_night), (40, "alignment")],
)
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


def test_rows_follow_a_saliency_that_knows_them_where_no_levels_are(llama):
    """ALPS can prune rows unequally, which levels of whole projections cannot show."""
    decoder = find_decoder(llama)
    for levels, by_row in ((True, False), (False, True)):
        allocation = Search(levels=levels).allocate(FakeSweep(decoder, {}, "alps"), 0.7)
        assert ("rows" in [stage["stage"] for stage in allocation.decisions["search"]["stages"]]) == by_row


@pytest.mark.parametrize(
    ("saliency", "arguments", "solved"),
    [
        ("alps", {}, True),
        ("sparsegpt", {}, True),
        ("alps", {"levels": False}, False),
        ("alps", {"objective": "alignment"}, False),  # which looks at inputs, not at outputs
        ("wanda", {}, False),
    ],
)
def test_levels_are_solved_around_the_target_where_weights_are_updated(saliency, arguments, solved, llama):
    decoder = find_decoder(llama)
    sweep = FakeSweep(decoder, {}, saliency)
    sweep.alignment_errors = lambda plans, *_args: sweep.output_errors(plans, "kl", None, "dense")
    Search(**arguments).allocate(sweep, 0.65)
    assert sweep.solved == (0.65 if solved else None)


@pytest.mark.parametrize("saliency", ["alps", "sparsegpt"])
def test_candidates_compute_with_levels_and_run_no_dense_block(saliency, ids):
    """With levels a candidate is one pass at most; without them the stream that a round begins with is paid for, too."""
    spent, ran, errors = {}, {}, {}
    for levels in (True, False):
        model = make_model("llama")
        before = state(model)
        with inference(model):
            method = ALPS(iterations=6) if saliency == "alps" else SALIENCIES.get(saliency)()
            sweep = build_sweep(find_decoder(model), method, ids, 4, 4)
            solve, counted = sweep.solve_levels, []

            def solve_levels(target, sweep=sweep, solve=solve, counted=counted):
                levels = solve(target)
                counted.append(sweep.engine.runner.block_forwards)
                return levels

            sweep.solve_levels = solve_levels
            allocation = Search(budget=25, rows=False, levels=levels).allocate(sweep, 0.6)
            ran[levels] = sweep.engine.runner.block_forwards - sum(counted)
            assert len(counted) == levels and (allocation.levels is not None) == levels
            plan = Space.of(sweep.decoder, 0.6)
            if levels:
                plans = [plan.plan(plan.uniform), allocation.plan]
                errors = sweep.output_errors(plans, "kl", None, allocation.levels)
        decisions = allocation.decisions["search"]
        spent[levels] = decisions["spent"]
        assert unchanged(model, before) and spent[levels] <= 25
        passes = ran[levels] / (4 * 3)  # the dense model's own among them; without levels, it is measured twice
        assert passes <= spent[levels] + (not levels)
    assert errors[1] < errors[0], "better than uniform"


def test_levels_go_with_the_search(ids, tmp_path):
    """A whole prune: levels that wait on disk, recorded ones, and none give plans that hit the target."""
    found = {}
    for name, fields in {
        "memory": {},
        "disk": {"max_hidden_bytes": 0},
        "recorded": {},
        "none": {"topup_args": {"levels": False}},
    }.items():
        arguments = {"saliency_args": {"iterations": 6}, "topup_args": {}, **fields}
        arguments["topup_args"] = {"budget": 16, **arguments["topup_args"]}
        memory = memory_of(arguments)
        config = NeuronALConfig(0.6, "alps", num_samples=12, num_alignment_samples=4, **arguments)
        pruner, model = NeuronALPruner(config), make_model("llama")
        pruner.prune(model, ids, tmp_path if name == "recorded" else None, **memory)
        assert pruner.report.achieved_sparsity == pytest.approx(0.6, abs=2e-3)
        found[name] = model.state_dict()
    assert len(list(tmp_path.glob("levels-*"))) == 3
    for name, same in (("disk", True), ("recorded", True), ("none", False)):
        assert all(torch.equal(value, found[name][key]) for key, value in found["memory"].items()) is same


def test_a_model_on_disk_is_searched_with_levels(ids, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", device_map={"": "disk"}, offload_folder=tmp_path / "offload"
    )
    in_memory = make_model("llama")
    fields = {"saliency_args": {"iterations": 6}, "topup_args": {"budget": 16}, "num_samples": 12}
    for own in (model, in_memory):
        NeuronALPruner(NeuronALConfig(0.6, "alps", num_alignment_samples=4, **fields)).prune(own, ids)
    assert torch.equal(model(ids).logits, in_memory(ids).logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": "yes"}, "levels is 'yes': expected True or False"),
        ({"budget": 3}, "budget is 3: expected a whole number of at least 8"),
        ({"objective": "kll"}, "Did you mean 'kl'"),
        ({"rows": 1}, "rows is 1: expected True or False"),
        ({"widths": (2.0,)}, "widths is 2.0"),
        ({"widths": ()}, "widths is empty"),
    ],
)
def test_bad_hyper_parameters(arguments, message):
    error = TypeError if {"levels", "rows"} & set(arguments) else ValueError
    with pytest.raises(error, match=message):
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
