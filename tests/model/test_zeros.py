"""Zeros in weights, by projection, by block and on the whole."""

from types import SimpleNamespace

import pytest
import torch
from by_hand import make_block
from conftest import make_model, make_model_on_disk

from optimum_neuronal.model.change import NewWeight, Zeros
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import Block
from optimum_neuronal.model.zeros import measure_sparsity


def measured(*blocks, changes=None):
    return measure_sparsity(SimpleNamespace(blocks=blocks), changes)


def test_zeros_are_counted_by_projection_by_block_and_on_the_whole():
    """3 of 4, 0 of 2 and 1 of 4 weights; a block without pruned projections is left out."""
    first = make_block([[0.0, 0.0], [0.0, 1.0]], [[1.0], [2.0]], name="first")
    last = make_block([[0.0, -1.0, 5.0, 2.0]], name="last")
    whole, blocks, projections = measured(first, Block("left out", first.module, {}), last)
    assert whole == pytest.approx(4 / 10) and blocks == {"first": 3 / 6, "last": 1 / 4}
    assert projections == {
        "first.0": {"sparsity": 0.75, "smallest_row": 0.5, "largest_row": 1.0},
        "first.1": {"sparsity": 0.0, "smallest_row": 0.0, "largest_row": 0.0},
        "last.0": {"sparsity": 0.25, "smallest_row": 0.25, "largest_row": 0.25},
    }


def test_what_weights_will_be_is_counted_before_they_are():
    block = make_block([[0.0, 2.0], [3.0, 4.0]], [[1.0], [2.0]])
    zeros, update = Zeros(torch.tensor([[True, False], [False, True]])), NewWeight(torch.tensor([[0.0], [7.0]]))
    whole, blocks, projections = measured(block, changes={"block.0": zeros, "block.1": update})
    assert whole == blocks["block"] == pytest.approx(4 / 6)
    assert projections["block.0"] == {"sparsity": 0.75, "smallest_row": 0.5, "largest_row": 1.0}
    assert [p.weight.tolist() for p in block.pruned] == [[[0.0, 2.0], [3.0, 4.0]], [[1.0], [2.0]]]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_offloaded_weights_are_read(family, tmp_path):
    assert measure_sparsity(find_decoder(make_model_on_disk(tmp_path, family))) == measure_sparsity(
        find_decoder(make_model(family))
    )
