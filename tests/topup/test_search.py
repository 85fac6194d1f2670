import pytest
import torch
from by_hand import mean
from conftest import make_model, make_model_on_disk
from profiles import by_day
from trial_helpers import build_trials, make_trials, state, unchanged

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.topup.search import Search, Space
from optimum_neuronal.trials import Trials
from optimum_neuronal.trials.solved import SolvedSparsities


class FakeTrials:
    """A bowl: the error is the squared distance from a plan that the search does not know."""

    def __init__(self, decoder, wanted, saliency="wanda"):
        self.decoder, self.wanted, self.saliency = decoder, wanted, SALIENCIES.get(saliency)()
        self.asked = 0
        self.solved = None

    def solve(self, wanted):
        self.solved = wanted.amounts
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
    trials = FakeTrials(decoder, dict(zip(space.names, wanted.tolist())))
    start = trials.output_errors([space.plan(space.uniform)], "kl", None, "dense")[0]
    allocation = Search(rows=False).allocate(trials, 0.7)
    (end,) = trials.output_errors([allocation.plan], "kl", None, "dense")
    assert end < 0.15 * start
    found = torch.tensor([allocation.plan.sparsity[name] for name in space.names], dtype=torch.float64)
    assert mean(space, found) == pytest.approx(0.7, abs=1e-9)
    assert (found * space.kinds["down"]).sum() < (space.uniform * space.kinds["down"]).sum()


def test_a_plan_is_only_ever_replaced_by_a_better_one(llama):
    decoder = find_decoder(llama)
    space = Space.of(decoder, 0.7)
    trials = FakeTrials(decoder, dict(zip(space.names, space.uniform.tolist())))
    stages = Search().allocate(trials, 0.7).decisions["search"]["stages"]
    ends = [stage["ended"] for stage in stages if "ended" in stage]
    assert ends == sorted(ends, reverse=True) and all(s["ended"] <= s["began"] for s in stages if "ended" in s)


BUDGETS = [(8, "kl"), (25, "nll"), (58, "kl"), (40, "alignment"), (90, "kl")]


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_the_budget_is_what_it_costs(family, ids):
    """One unit is one pass of the alignment sequences through all blocks, counted by the engine."""
    model = make_model(family)
    with inference(model):
        for budget, objective in by_day(BUDGETS, *(BUDGETS[:4] if family == "llama" else BUDGETS[1:4])):
            trials = make_trials(model, ids)
            allocation = Search(budget=budget, objective=objective).allocate(trials, 0.6)
            spent = allocation.decisions["search"]["spent"]
            forwards = trials.runner.block_forwards / (4 * len(trials.decoder.blocks))
            assert 0.7 * spent <= forwards <= spent <= budget, "less where candidates share blocks"


@pytest.mark.parametrize(
    "saliency, arguments, levels, by_row",
    [
        ("wanda", {}, False, True),
        ("sparsegpt", {}, True, False),
        ("alps", {}, True, False),
        ("alps", {"solved": False}, False, True),
        ("alps", {"objective": "alignment"}, False, True),  # which looks at inputs, not at outputs
    ],
)
def test_weights_that_are_updated_have_levels_around_the_target_or_rows(saliency, arguments, levels, by_row, llama):
    """ALPS can prune rows unequally, which levels of whole projections cannot show."""
    trials = FakeTrials(find_decoder(llama), {"model.layers.0.mlp.down_proj": 0.6}, saliency)
    trials.alignment_errors = lambda plans, *_args: trials.output_errors(plans, "kl", None, "dense")
    allocation = Search(**arguments).allocate(trials, 0.65)
    assert trials.solved == (SolvedSparsities.around(0.65).amounts if levels else None)
    assert ("rows" in [stage["stage"] for stage in allocation.decisions["search"]["stages"]]) == by_row
    assert by_row or all(isinstance(value, float) for value in allocation.plan.sparsity.values())


@pytest.mark.parametrize("saliency", [ALPS(iterations=6), SparseGPT()])
def test_candidates_compute_with_levels_and_run_no_dense_block(saliency, llama, ids, monkeypatch):
    """With levels a candidate is one pass at most; without them the stream that a round begins with is paid for, too."""
    before, solve = state(llama), Trials.solve
    for levels in (True, False):
        with inference(llama):
            trials = build_trials(find_decoder(llama), saliency, ids, 4)
            counted, weights, runner = [], [], trials.runner

            def counting(self, wanted, counted=counted, weights=weights, runner=runner):
                found = solve(self, wanted)
                weights.append(found)
                counted.append(runner.block_forwards)
                return found

            monkeypatch.setattr(Trials, "solve", counting)
            allocation = Search(budget=25, rows=False, solved=levels).allocate(trials, 0.6)
            passes = (runner.block_forwards - sum(counted)) / (4 * 3)
            assert len(counted) == levels
            if levels:
                space = Space.of(trials.decoder, 0.6)
                plans = [space.plan(space.uniform), allocation.plan]
                uniform, found = trials.output_errors(plans, "kl", None, weights[0])
                assert found < uniform
        assert unchanged(llama, before)
        # The dense model's own is among them; without levels, it is measured twice.
        assert passes - (not levels) <= allocation.decisions["search"]["spent"] <= 25


def test_levels_go_with_the_search(ids, tmp_path):
    """A whole prune: levels in memory, on disk, recorded, of a model on disk, and none hit the target."""
    models = {name: make_model("llama") for name in ("memory", "disk", "recorded", "none")}
    models["offloaded"] = make_model_on_disk(tmp_path, "llama")
    logits = {}
    for name, model in models.items():
        topup_args = {"budget": 16, "solved": name != "none"}
        fields = {"saliency_args": {"iterations": 6}, "num_samples": 12, "num_alignment_samples": 4}
        pruner = NeuronALPruner(NeuronALConfig(0.6, "alps", topup="search", topup_args=topup_args, **fields))
        work_dir, limit = (tmp_path / "work" if name == "recorded" else None), (0 if name == "disk" else None)
        pruner.prune(model, ids, work_dir, max_hidden_bytes=limit)
        assert pruner.report.achieved_sparsity == pytest.approx(0.6, abs=2e-3)
        logits[name] = model(ids).logits
    assert len(list((tmp_path / "work").glob("solved-*"))) == 3
    expected = state(models["memory"])
    assert unchanged(models["disk"], expected) and unchanged(models["recorded"], expected)
    assert torch.equal(logits["offloaded"], logits["memory"])
    assert not torch.equal(logits["none"], logits["memory"])
