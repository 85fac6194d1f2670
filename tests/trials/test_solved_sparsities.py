"""Weights solved at a few sparsities: what is between them, where they lie, and what they cost."""

from pathlib import Path

import pytest
import torch
from conftest import make_ids, make_model
from interruptions import interrupt_at_second_block
from trial_helpers import build_trials, state, unchanged, uniform

from optimum_neuronal.blocks.block_inputs import Stream, inference
from optimum_neuronal.files.records import Records
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.trials import solved as solved_module
from optimum_neuronal.trials.solved import SolvedSparsities


FAST = ALPS(iterations=6)


class Solved:
    """A model with its levels at hand."""

    def __init__(self, model, ids, saliency=FAST, batch_size=4, **options):
        self.model = model
        self.trials = build_trials(find_decoder(model), saliency, ids, 4, batch_size, **options)
        with inference(model):
            self.levels = self.trials.solve(SolvedSparsities.around(0.6))

    def weight(self, projection, sparsity):
        """What a trial of a sparsity computes with."""
        index = next(i for i, block in enumerate(self.trials.decoder.blocks) if projection.name in block.projections)
        (change_of,) = self.levels.changes(index, [uniform(self.trials, sparsity)])
        return change_of(projection).applied(projection.weight)

    def all_weights(self, sparsity) -> dict[str, torch.Tensor]:
        return {name: self.weight(p, sparsity) for name, p in self.trials.decoder.projections.items()}


@pytest.fixture(scope="module")
def solved():
    """A Llama with its levels in memory, which tests only read."""
    return Solved(make_model("llama"), make_ids())


def equal(weights, others) -> bool:
    return all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_levels_lie_around_the_target():
    for target in (0.3, 0.5, 0.7, 0.95):
        found = SolvedSparsities.around(target).amounts
        assert list(found) == sorted(found) and all(0 < sparsity < 1 for sparsity in found)
        assert any(sparsity == pytest.approx(target) for sparsity in found)
    assert SolvedSparsities.around(0.7).amounts == pytest.approx((0.4, 0.55, 0.64, 0.7, 0.775, 0.865, 0.94))
    assert len(SolvedSparsities.around(0.3).amounts) == 5, "none below 0"


def test_at_a_level_the_weight_is_the_solved_one(solved, ids):
    """Bit for bit, on the dense model's inputs of the sequences that trials are not measured on."""
    runner = solved.trials.runner
    with inference(solved.model):
        inputs = runner.capture(ids[4:])
        stream = Stream(inputs.hidden)
        for block, calls in zip(solved.trials.decoder.blocks, inputs.calls):
            stream, norms = runner.replay(block, stream, calls, ALPS.statistic)
            query, value = block.pruned[0], block.pruned[2]
            alike = {p.name: p.weight for p in block.pruned[:3]}
            for sparsity in solved.levels.amounts:
                hessian = norms[query.name].hessian
                expected = FAST.quick().solve(alike, hessian, dict.fromkeys(alike, sparsity), torch.float32)
                assert torch.equal(solved.weight(value, sparsity), expected[value.name].weight)
                zeros = (solved.weight(value, sparsity) == 0).float().mean().item()
                assert zeros == pytest.approx(sparsity, abs=2 / value.weight.numel())


def test_between_two_levels_it_is_interpolated(solved):
    projection = solved.trials.decoder.blocks[1].pruned[-1]
    for low, high in zip(solved.levels.amounts, solved.levels.amounts[1:]):
        for share in (0.25, 0.5):
            expected = (1 - share) * solved.weight(projection, low) + share * solved.weight(projection, high)
            found = solved.weight(projection, (1 - share) * low + share * high)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_at_the_ends_it_is_dense_and_nothing(solved):
    projection = solved.trials.decoder.blocks[0].pruned[0]
    assert torch.equal(solved.weight(projection, 0.0), projection.weight)
    assert not solved.weight(projection, 1.0).any()
    first, last = solved.levels.amounts[0], solved.levels.amounts[-1]
    expected = (projection.weight + solved.weight(projection, first)) / 2
    torch.testing.assert_close(solved.weight(projection, first / 2), expected)
    torch.testing.assert_close(solved.weight(projection, (1 + last) / 2), solved.weight(projection, last) / 2)


@pytest.mark.parametrize("family, saliency", [("gpt2", FAST), ("mixtral", FAST), ("llama", SparseGPT())])
def test_weights_that_are_transposed_or_stacked(family, saliency, ids):
    solved = Solved(make_model(family, num_hidden_layers=1), ids, saliency)
    for name, weight in solved.all_weights(0.6).items():
        assert weight.shape == solved.trials.decoder.projections[name].shape
        assert (weight == 0).sum().item() == pytest.approx(0.6 * weight.numel(), abs=1.1), name


@pytest.mark.parametrize("fields", [{"family": "llama"}, {"family": "mixtral", "num_local_experts": 2}])
def test_no_bit_depends_on_the_batches(fields, ids):
    first, second = (Solved(make_model(**fields, num_hidden_layers=2), ids, batch_size=size) for size in (1, 5))
    assert equal(first.all_weights(0.63), second.all_weights(0.63))


def test_trials_compute_with_them(llama, ids):
    """Nearer to the dense model than what is left of the weights as they are, and at one pass of the sequences."""
    before, solved = state(llama), Solved(llama, ids)
    assert unchanged(llama, before)
    trials, levels = solved.trials, solved.levels
    plans = [uniform(trials, sparsity) for sparsity in (0.0, 0.5, 0.6, 0.63)]
    with inference(llama):
        errors = trials.output_errors(plans, "kl", None, levels)
        trials.runner.block_forwards = 0
        assert trials.output_errors(plans[2:3], "kl", None, levels) == errors[2:3]
        assert trials.runner.block_forwards == 4 * 3
        (masked,) = trials.output_errors(plans[2:3], "kl", None, plans[2])
    assert errors[0] == pytest.approx(0, abs=1e-6) and errors[0] < errors[1] < errors[2] < min(errors[3], masked)
    assert unchanged(llama, before)


def test_they_lie_on_disk_beyond_the_budget_in_a_folder_that_goes_with_them(solved, llama, ids):
    on_disk = Solved(llama, ids, max_hidden_bytes=0)
    assert solved.levels.blocks and not solved.levels.records.keeps
    assert not on_disk.levels.blocks and on_disk.levels.records.keeps
    for sparsity in (solved.levels.amounts[2], 0.63, 0.2, 0.97):
        assert equal(solved.all_weights(sparsity), on_disk.all_weights(sparsity))
    folder = Path(on_disk.levels.records.directory)
    assert len(list(folder.glob("solved-*.safetensors"))) == 3
    on_disk.levels = None
    on_disk.trials.cache.release()
    assert not folder.exists()


def test_recorded_levels_are_not_solved_again(solved, llama, ids, tmp_path, monkeypatch):
    calls = interrupt_at_second_block(monkeypatch, solved_module, "_solve_block")
    with pytest.raises(ConnectionError):
        Solved(llama, ids, records=Records(tmp_path))
    assert calls == ["model.layers.0", "model.layers.1"]
    resumed = Solved(llama, ids, records=Records(tmp_path))
    assert calls[2:] == ["model.layers.1", "model.layers.2"]
    again = Solved(llama, ids, records=Records(tmp_path), max_hidden_bytes=0)
    assert len(calls) == 4 and again.levels.records.directory == tmp_path
    for other in (resumed, again):
        assert equal(solved.all_weights(0.63), other.all_weights(0.63))
    lost = next(tmp_path.glob("solved-00001*"))
    lost.write_bytes(lost.read_bytes()[:-9])
    with pytest.raises(OSError, match="solved-00001 cannot be read from .*Use another disk"):
        again.all_weights(0.63)
