"""Weights quantized before trials: what a plan makes of them, where they lie, and what they cost."""

from pathlib import Path

import pytest
import torch
from conftest import make_ids, make_model
from interruptions import interrupt_at_second_block
from trial_helpers import build_trials, state, unchanged

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.files.records import Records
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.saliency.low_bit import LowBit
from optimum_neuronal.saliency.plan import DENSE, RatePlan
from optimum_neuronal.trials import quantized_blocks


def quantize(bits=2, **options):
    model = make_model("llama")
    trials = build_trials(find_decoder(model), LowBit(), make_ids(), 4, **options)
    with inference(model):
        return trials, trials.quantize(bits)


def weights(trials, quantized):
    """What trials of all projections compute with, by name."""
    found = {}
    for index, block in enumerate(trials.decoder.blocks):
        (change_of,) = quantized.changes(index, [RatePlan(dict.fromkeys(block.pruned_names, quantized.bits))])
        found |= {p.name: change_of(p).applied(p.weight) for p in block.pruned}
    return found


@pytest.fixture(scope="module")
def known():
    return quantize()


def test_a_plan_takes_what_was_quantized_and_leaves_the_others_dense(known):
    trials, quantized = known
    first, second = trials.decoder.blocks[0].pruned[:2]
    (change_of,) = quantized.changes(0, [RatePlan({first.name: 2, second.name: DENSE})])
    change = change_of(first)
    assert isinstance(change, QuantizedWeight) and change.bits == 2 and change.shape == first.shape
    assert torch.equal(change_of(second).applied(second.weight), second.weight)
    (more_of,) = quantize(bits=4)[1].changes(0, [RatePlan({first.name: 4})])
    lost = [(own.applied(first.weight) - first.weight).square().sum() for own in (change, more_of(first))]
    assert more_of(first).bits == 4 and 0 < lost[1] < lost[0] / 4


def test_trials_lose_more_with_more_quantized_projections(known):
    trials, quantized = known
    before, names = state(trials.decoder.model), list(trials.decoder.projections)
    plans = [RatePlan(dict.fromkeys(names, DENSE) | dict.fromkeys(names[:count], 2)) for count in (0, 3, len(names))]
    with inference(trials.decoder.model):
        errors = trials.output_errors(plans, "kl", None, quantized)
    assert errors[0] == pytest.approx(0, abs=1e-6) and 1e-6 < errors[1] < errors[2]
    assert unchanged(trials.decoder.model, before)


def test_they_lie_on_disk_beyond_the_budget_in_a_folder_that_goes_with_them(known):
    trials, quantized = known
    other, on_disk = quantize(max_hidden_bytes=0)
    assert quantized.blocks and not quantized.records.keeps
    assert not on_disk.blocks and on_disk.records.keeps
    expected = weights(trials, quantized)
    assert all(torch.equal(expected[name], weight) for name, weight in weights(other, on_disk).items())
    folder = Path(on_disk.records.directory)
    assert len(list(folder.glob("quantized-*.safetensors"))) == 3
    del on_disk
    other.cache.release()
    assert not folder.exists()


def test_recorded_blocks_are_not_quantized_again(known, tmp_path, monkeypatch):
    calls = interrupt_at_second_block(monkeypatch, quantized_blocks, "_quantize_block")
    with pytest.raises(ConnectionError):
        quantize(records=Records(tmp_path))
    assert calls == ["model.layers.0", "model.layers.1"]
    resumed = quantize(records=Records(tmp_path))
    assert calls[2:] == ["model.layers.1", "model.layers.2"]
    again = quantize(records=Records(tmp_path), max_hidden_bytes=0)
    assert len(calls) == 4 and again[1].records.directory == tmp_path
    expected = weights(*known)
    for other in (resumed, again):
        assert all(torch.equal(expected[name], weight) for name, weight in weights(*other).items())
    lost = next(tmp_path.glob("quantized-00001*"))
    lost.write_bytes(lost.read_bytes()[:-9])
    with pytest.raises(OSError, match="quantized-00001 cannot be read from .*Use another disk"):
        weights(*again)
