"""A linear layer that holds and multiplies its weight packed."""

import torch
from torch import nn
from transformers import Conv1D

from .formats.packed_matrix import PackedMatrix
from .ops import ADVICE
from .packed_module import PackedModule, take_place


AS_LINEAR = ("FalconLinear",)  # subclasses of nn.Linear whose own forward computes the same


def is_linear(kind: type) -> bool:
    """Return True if modules of a class compute `x @ W.T + bias` and nothing else."""
    is_made_alike = issubclass(kind, nn.Linear) and kind.__init__ is nn.Linear.__init__
    return kind is Conv1D or is_made_alike and (kind.forward is nn.Linear.forward or kind.__name__ in AS_LINEAR)


class PackedLinear(PackedModule):
    """A layer of class `kind`, `nn.Linear` or `Conv1D`, with a packed weight (out, in) and a bias (out,)."""

    def __init__(self, matrix: PackedMatrix, bias: torch.Tensor | None = None, kind: type[nn.Module] = nn.Linear):
        super().__init__(matrix, transposed=kind is Conv1D)
        self.stands_for = kind
        self.in_features, self.out_features = self.columns, self.row_count
        self.register_buffer("bias", None if bias is None else bias.detach())

    def to_dense_module(self) -> nn.Module:
        """Return the `nn.Linear` or `Conv1D` that it was made of, with the same weight bit for bit and the same bias."""
        return make_linear(self, self.dense_parameter())

    @property
    def dense_shape(self) -> tuple[int, int]:
        shape = (self.out_features, self.in_features)
        return shape[::-1] if self.transposed else shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ W.T + bias`, (..., in) -> (..., out), of the weight's dtype or, under autocast, of autocast's."""
        return autocast(self.linear(x, self._buffers["bias"]))  # skips nn.Module.__getattr__

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        advice = f"for inference only: to train it, {ADVICE}; for LoRA beside it, see optimum_neuronal.lora_for_packed"
        return f"{sizes}, {super().extra_repr()}, {advice}"  # PEFT quotes it when it refuses the module


def make_linear(packed: nn.Module, weight: nn.Parameter) -> nn.Module:
    """Return the layer for which a packed one stands, with this weight."""
    with torch.device("meta"):
        if packed.stands_for is Conv1D:
            linear = Conv1D(packed.out_features, packed.in_features)
        else:
            linear = packed.stands_for(packed.in_features, packed.out_features, bias=packed.bias is not None)
    linear.weight = weight
    linear.bias = None if packed.bias is None else nn.Parameter(packed.bias, requires_grad=weight.requires_grad)
    return take_place(linear, packed)


def autocast(output: torch.Tensor) -> torch.Tensor:
    """Convert an output to the dtype of autocast, if it is enabled."""
    device = output.device.type
    return output.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else output
