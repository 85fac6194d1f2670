"""The state of the dense model around packed modules, for writers of checkpoints."""

import torch
from torch import nn

from ..packed.formats.packed_matrix import swapped
from ..packed.formats.stand_in import StandIn
from ..packed.packed_module import PackedModule, packed_modules
from ..packed.packed_tensor import PackedTensor


__all__ = ["PackedModule", "dense_state", "packed_modules"]


def dense_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, StandIn]]:
    """Return the state of the dense model in two parts: its tensors, and stand-ins for packed weights."""
    state, packed = model.state_dict(), {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedModule):
            for buffer in module.stored_names:
                state.pop(f"{name}.{buffer}", None)
            shape = swapped(module.dense_shape, False)
            packed[f"{name}{module.suffix}"] = PackedTensor(module.matrix, shape, module.transposed)
    return state, packed
