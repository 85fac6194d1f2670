"""A linear layer that holds and multiplies its weight packed."""

import torch
from torch import nn
from transformers import Conv1D

from ..compat.buffer_module import inherit_hooks
from .ops import ADVICE
from .packed_module import PackedModule
from .packed_weight import PackedWeight


AS_LINEAR = ("FalconLinear",)  # subclasses of nn.Linear whose own forward computes the same


def is_linear(kind: type) -> bool:
    """Return True if modules of a class compute `x @ W.T + bias` and nothing else."""
    has_usual_init = issubclass(kind, nn.Linear) and kind.__init__ is nn.Linear.__init__
    return kind is Conv1D or has_usual_init and (kind.forward is nn.Linear.forward or kind.__name__ in AS_LINEAR)


class PackedLinear(PackedModule):
    """A layer of class `kind`, `nn.Linear` or `Conv1D`, with a packed weight (out, in) and a bias (out,)."""

    def __init__(self, matrix: PackedWeight, bias: torch.Tensor | None = None, kind: type[nn.Module] = nn.Linear):
        super().__init__(matrix, matrix.shape, transposed=kind is Conv1D)
        self.stands_for = kind
        self.in_features, self.out_features = self.columns, self.row_count
        self.register_buffer("bias", None if bias is None else bias.detach())

    def to_dense_module(self) -> nn.Module:
        """Return the `nn.Linear` or `Conv1D` that it was made of, with the same weight bit for bit and the same bias."""
        weight = self.dense_parameter()
        with torch.device("meta"):
            if self.stands_for is Conv1D:
                linear = Conv1D(self.out_features, self.in_features)
            else:
                linear = self.stands_for(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight = weight
        linear.bias = None if self.bias is None else nn.Parameter(self.bias, requires_grad=weight.requires_grad)
        return inherit_hooks(linear, self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ W.T + bias`, (..., in) -> (..., out), of the weight's dtype or, under autocast, of autocast's."""
        output = self.multiply(x, self.held["bias"])
        device = output.device.type
        return output.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else output

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        advice = f"for inference only: to train it, {ADVICE}; for LoRA on it, see optimum_neuronal.lora_for_packed"
        return f"{sizes}, {super().extra_repr()}, {advice}"  # PEFT quotes it when it refuses the module
