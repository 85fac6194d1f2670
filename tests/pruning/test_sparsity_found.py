from types import SimpleNamespace

import pytest
import torch
from by_hand import make_block

from optimum_neuronal.model.projections import Block
from optimum_neuronal.pruning.reporting import measure_sparsity
from optimum_neuronal.sparsity.masks import NewWeight, Zeros


def test_zeros_are_counted_by_projection_by_block_and_on_the_whole():
    """3 of 4, 0 of 2 and 1 of 4 weights; a block of which nothing is pruned is not told of."""
    first = make_block([[0.0, 0.0], [0.0, 1.0]], [[1.0], [2.0]], name="first")
    last = make_block([[0.0, -1.0, 5.0, 2.0]], name="last")
    decoder = SimpleNamespace(blocks=[first, Block("left out", make_block([[0.0]]).module, {}), last])
    whole, blocks, projections = measure_sparsity(decoder)
    assert whole == pytest.approx(4 / 10)
    assert blocks == {"first": 3 / 6, "last": 1 / 4}
    assert projections == {
        "first.0": {"sparsity": 0.75, "smallest_row": 0.5, "largest_row": 1.0},
        "first.1": {"sparsity": 0.0, "smallest_row": 0.0, "largest_row": 0.0},
        "last.0": {"sparsity": 0.25, "smallest_row": 0.25, "largest_row": 0.25},
    }


def test_what_weights_will_be_is_counted_before_they_are():
    block = make_block([[0.0, 2.0], [3.0, 4.0]], [[1.0], [2.0]])
    changes = {
        "block.0": Zeros(torch.tensor([[True, False], [False, True]])),
        "block.1": NewWeight(torch.tensor([[0.0], [7.0]])),
    }
    whole, blocks, projections = measure_sparsity(SimpleNamespace(blocks=[block]), changes)
    assert whole == blocks["block"] == pytest.approx(4 / 6)
    assert projections["block.0"] == {"sparsity": 0.75, "smallest_row": 0.5, "largest_row": 1.0}
    assert [p.weight.tolist() for p in block.pruned] == [[[0.0, 2.0], [3.0, 4.0]], [[1.0], [2.0]]]
