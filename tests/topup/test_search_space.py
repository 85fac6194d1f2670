import pytest
import torch
from by_hand import mean
from conftest import make_model
from trial_helpers import make_evaluator

from optimum_neuronal.common.inference import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.topup.search import LENGTHS, STREAM_COST, Space, _Run, kind_moved
from optimum_neuronal.trials.output_errors import OutputErrors


def test_directions_cover_every_kind():
    space = Space.of(find_decoder(make_model("mixtral")), 0.7)
    assert set(space.kinds) == {"query and key", "value", "output", "experts' gate_up", "experts' down"}
    assert sum(space.kinds.values()).tolist() == [1.0] * len(space.names)
    assert _Run(None, space, "kl", 58).cost_of_round(0) == STREAM_COST + 5 + len(LENGTHS)
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
    assert passes == space.cost(torch.stack(candidates)) == 0.5 + 0.5 * len(late)


def test_sparsities_are_shifted_to_the_target_by_the_sizes(llama):
    space = Space.of(find_decoder(llama, targets=["down_proj", "k_proj"]), 0.5)  # 48 x 32 and 32 x 32 weights
    assert sorted(set(space.sizes.tolist())) == [1024, 1536]
    moved = space.on_target(space.uniform + 0.1 * space.kinds["down"])
    expected = {"mlp.down_proj": 0.54, "self_attn.k_proj": 0.44}
    plan = space.plan(moved)
    for name, value in plan.sparsity.items():
        assert value == pytest.approx(expected[name.split(".", 3)[3]]), name
