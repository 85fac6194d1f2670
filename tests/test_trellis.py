"""The trellis codes that benchmarks/few_bits.py compares with: walks by hand, and the error that they are known for."""

import importlib
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def trellis():
    """benchmarks.trellis."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent)
        yield importlib.import_module("benchmarks.trellis")


@pytest.fixture
def wanted():
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_step_shifts_bits_into_the_state(trellis, wanted, bits):
    ends = torch.arange(16)
    states = trellis._walk(wanted, bits, ends)
    before = torch.cat([ends[:, None], states[:, :-1]], dim=1)
    kept = 2 ** (trellis.STATES - bits)
    assert torch.equal(states >> bits, before % kept)
    assert torch.equal(states[:, -1], ends)


def test_no_walk_is_nearer_than_the_one_that_is_found(trellis):
    """A walk of three steps from any state, against all of them."""
    wanted = torch.tensor([[0.4, -1.3, 0.9]])
    found = (trellis._values(2)[trellis._walk(wanted, 2)] - wanted).square().sum()
    states = torch.arange(2 ** (trellis.STATES + 4))
    walks = torch.stack([states >> 4, states >> 2, states], dim=1) % 2**trellis.STATES
    assert float(found) == pytest.approx(float((trellis._values(2)[walks] - wanted).square().sum(dim=1).min()))


def test_two_bits_lose_less_than_the_best_four_levels_would(trellis, wanted):
    """0.1175 of a Gaussian's variance (Max, 1960); no code loses less than a sixteenth."""
    lost = float((trellis._closed_walks(wanted, 2) - wanted).square().mean() / wanted.square().mean())
    assert 1 / 16 < lost < 0.1
