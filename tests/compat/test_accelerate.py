from types import SimpleNamespace

import torch
from torch import nn

from optimum_neuronal.compat.hf_private import execution_device, is_offloaded
from optimum_neuronal.model.projections import Projection


META = torch.device("meta")


def offloaded(weight):
    """A linear layer as accelerate leaves it, with its weight elsewhere."""
    linear = nn.Linear(3, 2, device=META)
    linear._hf_hook = SimpleNamespace(offload=True, execution_device="cpu", weights_map={"weight": weight})
    return linear


def test_weights_in_memory():
    linear = nn.Linear(3, 2)
    assert not is_offloaded(linear) and execution_device(linear) == torch.device("cpu")
    stored = Projection("up", "up", linear, True).stored_weight
    assert stored.shape == (2, 3) and stored.data_ptr() == linear.weight.data_ptr()


def test_weights_elsewhere():
    for transposed in (False, True):
        weight = torch.arange(6.0).view(2, 3)
        linear = offloaded(weight)
        assert is_offloaded(linear) and execution_device(linear) == torch.device("cpu")
        stored = Projection("up", "up", linear, True, transposed=transposed).stored_weight
        assert torch.equal(stored, weight.T if transposed else weight) and stored.data_ptr() == weight.data_ptr()
