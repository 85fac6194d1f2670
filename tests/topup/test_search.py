import pytest
import torch
from by_hand import mean
from conftest import make_model
from profiles import by_day
from trial_helpers import build_evaluator, make_evaluator, state, unchanged

from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.topup.search import LENGTHS, STREAM_COST, Search, Space, _Run, kind_moved
from optimum_neuronal.trials.output_errors import OutputErrors
from optimum_neuronal.trials.scores import RowSaliency


class FakeTrials:
    """A bowl: the error is the squared distance from a plan that the search does not know."""

    def __init__(self, decoder, wanted, saliency="wanda"):
        self.decoder, self.wanted, self.saliency = decoder, wanted, SALIENCIES.get(saliency)()

    def measure(self, measurement, plans):
        if isinstance(measurement, RowSaliency):
            return {name: torch.arange(p.shape[0]).double() for name, p in self.decoder.projections.items()}
        errors = []
        for plan in plans:
            means = {name: torch.as_tensor(value, dtype=torch.float64).mean() for name, value in plan.sparsity.items()}
            errors.append(sum(float(means[name] - value) ** 2 for name, value in self.wanted.items()))
        return errors


def test_it_finds_a_shift_between_kinds(llama):
    """The known best plan spares down projections, and late blocks less than early ones."""
    decoder = find_decoder(llama)
    space = Space.of(decoder, 0.7)
    wanted = space.on_target(space.uniform + 0.1 * space.depth - 0.12 * space.kinds["down"])
    evaluator = FakeTrials(decoder, dict(zip(space.names, wanted.tolist())))
    (start,) = evaluator.measure(None, [space.plan(space.uniform)])
    allocation = Search(rows=False).allocate(evaluator, 0.7)
    (end,) = evaluator.measure(None, [allocation.plan])
    assert end < 0.15 * start
    sparsities = torch.tensor([allocation.plan.sparsity[name] for name in space.names], dtype=torch.float64)
    assert mean(space, sparsities) == pytest.approx(0.7, abs=1e-9)
    assert (sparsities * space.kinds["down"]).sum() < (space.uniform * space.kinds["down"]).sum()


def test_a_plan_is_only_ever_replaced_by_a_better_one(llama):
    decoder = find_decoder(llama)
    space = Space.of(decoder, 0.7)
    evaluator = FakeTrials(decoder, dict(zip(space.names, space.uniform.tolist())))
    stages = Search().allocate(evaluator, 0.7).decisions["search"]["stages"]
    ends = [stage["ended"] for stage in stages if "ended" in stage]
    assert ends == sorted(ends, reverse=True) and all(s["ended"] <= s["began"] for s in stages if "ended" in s)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_the_budget_is_what_it_costs(family, ids):
    """One unit is one pass of the alignment sequences through all blocks, counted by the engine."""
    model = make_model(family)
    with inference(model):
        for budget in by_day([8, 25, 58, 90], *([8, 25, 58] if family == "llama" else [25, 58])):
            evaluator = make_evaluator(model, ids)
            allocation = Search(budget=budget).allocate(evaluator, 0.6)
            spent = allocation.decisions["search"]["spent"]
            forwards = evaluator.runner.block_forwards / (4 * len(evaluator.decoder.blocks))
            assert 0.7 * spent <= forwards <= spent <= budget, "less where candidates share blocks"


@pytest.mark.parametrize("saliency, by_row", [("wanda", True), ("sparsegpt", False), ("alps", True)])
def test_rows_are_spread_if_the_saliency_can_prune_them_unequally(saliency, by_row, llama):
    evaluator = FakeTrials(find_decoder(llama), {"model.layers.0.mlp.down_proj": 0.6}, saliency)
    allocation = Search().allocate(evaluator, 0.65)
    assert ("rows" in [stage["stage"] for stage in allocation.decisions["search"]["stages"]]) == by_row
    assert by_row or all(isinstance(value, float) for value in allocation.plan.sparsity.values())


@pytest.mark.parametrize("saliency", [ALPS(iterations=6), SparseGPT()])
def test_the_budget_holds_with_a_saliency_that_updates_weights(saliency, llama, ids):
    before = state(llama)
    with inference(llama):
        evaluator = build_evaluator(find_decoder(llama), saliency, ids, 4)
        allocation = Search(budget=25, rows=False).allocate(evaluator, 0.6)
    passes = evaluator.runner.block_forwards / (4 * 3)
    assert unchanged(llama, before)
    # The dense model is measured twice.
    assert passes - 1 <= allocation.decisions["search"]["spent"] <= 25


def test_directions_cover_every_kind():
    space = Space.of(find_decoder(make_model("mixtral")), 0.7)
    assert set(space.kinds) == {"query and key", "value", "output", "experts' gate_up", "experts' down"}
    assert sum(space.kinds.values()).tolist() == [1.0] * len(space.names)
    assert _Run(None, space, 58).cost_of_round(0) == STREAM_COST + 5 + len(LENGTHS)
    without_roles = find_decoder(make_model("llama"), targets=["."])
    assert {kind_moved(p) for p in without_roles.projections.values()} >= {"query and key", "down"}


def test_directions_move_something_and_leave_the_target_as_it_is():
    for family, layers in (("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("mixtral", "num_hidden_layers")):
        space = Space.of(find_decoder(make_model(family, **{layers: 3})), 0.7)
        for name, direction in [*space.directions(0).items(), *space.directions(1).items()]:
            assert (direction * space.sizes).sum().abs() < 1e-6, name
            moved = space.uniform + 0.05 * direction
            assert space.on_target(moved) is moved, "nothing is shifted, so that what is alike stays so bit for bit"
            assert mean(space, moved) == pytest.approx(0.7, abs=1e-9), name
            assert not torch.allclose(moved, space.uniform), name
            assert not name.endswith("late") or not direction[space.depth <= 0].any()


def test_late_candidates_share_the_early_half(ids):
    """Counted by the engine: what the search says that it spent is what was run, and less than without sharing."""
    model = make_model("llama", num_hidden_layers=4)
    with inference(model):
        evaluator = make_evaluator(model, ids, "magnitude")
        space = Space.of(evaluator.decoder, 0.6)
        late = [d for name, d in space.directions(1).items() if name.endswith("late")]
        candidates = [space.on_target(space.uniform + 0.05 * direction) for direction in late]
        evaluator.measure(OutputErrors("kl"), [space.plan(space.uniform)])  # the dense pass is made here
        before = evaluator.runner.block_forwards
        evaluator.measure(OutputErrors("kl"), [space.plan(candidate) for candidate in candidates])
        passes = (evaluator.runner.block_forwards - before) / (4 * 4)
    assert passes == space.cost(candidates) == 0.5 + 0.5 * len(late)


def test_sparsities_are_shifted_to_the_target_by_the_sizes(llama):
    space = Space.of(find_decoder(llama, targets=["down_proj", "k_proj"]), 0.5)  # 48 x 32 and 32 x 32 weights
    assert sorted(set(space.sizes.tolist())) == [1024, 1536]
    moved = space.on_target(space.uniform + 0.1 * space.kinds["down"])
    expected = {"mlp.down_proj": 0.54, "self_attn.k_proj": 0.44}
    plan = space.plan(moved)
    for name, value in plan.sparsity.items():
        assert value == pytest.approx(expected[name.split(".", 3)[3]]), name
