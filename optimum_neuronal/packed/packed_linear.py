"""A linear layer whose weight is held and multiplied packed."""

import torch
from torch import nn
from transformers import Conv1D

from ..model.architectures import AS_LINEAR
from .formats.packed_matrix import DTYPES, PackedMatrix
from .formats.sparse import SparseWeight
from .inference_only import ADVICE, mark, watched
from .packed_module import PackedBuffers, WeightFacts, take_place


def is_linear(kind: type) -> bool:
    """Return True if modules of a class compute `x @ W.T + bias` and nothing else."""
    same = issubclass(kind, nn.Linear) and (kind.forward is nn.Linear.forward or kind.__name__ in AS_LINEAR)
    return same or kind is Conv1D


class PackedLinear(PackedBuffers):
    """Computes what the `nn.Linear` or `Conv1D` did that it was made of; only for inference.

    Args:
        matrix ([`PackedMatrix`]): the weight, shape (out, in).
        bias (`Tensor`, *optional*): shape (out,), of the weight's dtype and on its device.
        kind (`type`): the class of the layer that it stands for; a `Conv1D` keeps its weight as (in, out).

    Attributes:
        bits, ... (`Tensor`): buffers, those of the matrix.
        weight ([`WeightFacts`]): shape, dtype and device of the weight, for models that ask for these.
    """

    suffix = ".weight"

    def __init__(self, matrix: PackedMatrix, bias: torch.Tensor | None = None, kind: type[nn.Module] = nn.Linear):
        super().__init__(matrix, transposed=kind is Conv1D)
        self.stands_for = kind
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def from_linear(cls, linear: nn.Module) -> "PackedLinear":
        """Pack the weight of an `nn.Linear` or a `Conv1D`, which is not changed, and share its bias.

        Raises:
            `TypeError`: it is neither.
            `ValueError`: its weight is not bfloat16, float16 or float32.
        """
        if not is_linear(type(linear)):
            raise TypeError(f"PackedLinear.from_linear takes an nn.Linear or a Conv1D, not a {type(linear).__name__}.")
        weight = linear.weight.detach()
        if weight.dtype not in DTYPES:
            raise ValueError(f"The weight is {weight.dtype}: expected one of {', '.join(map(str, DTYPES))}.")
        matrix = SparseWeight.pack(weight.T if isinstance(linear, Conv1D) else weight)
        return take_place(cls(matrix, linear.bias, type(linear)), linear)

    def to_linear(self) -> nn.Module:
        """Return the `nn.Linear` or `Conv1D` that it was made of, with the same weight to the bit and the same bias."""
        with torch.device("meta"):
            if self.transposed:
                linear = Conv1D(self.out_features, self.in_features)
            else:
                linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
                linear.__class__ = self.stands_for
        linear.weight = nn.Parameter(self.dense())
        linear.bias = None if self.bias is None else nn.Parameter(self.bias)
        return take_place(linear, self)

    @property
    def in_features(self) -> int:
        """Number of input features."""
        return self.columns

    @property
    def out_features(self) -> int:
        """Number of output features."""
        return self.row_count

    @property
    def nf(self) -> int:
        """The number of output features, as `Conv1D` calls it."""
        return self.out_features

    nx = in_features

    @property
    def dense_shape(self) -> tuple[int, int]:
        shape = (self.out_features, self.in_features)
        return shape[::-1] if self.transposed else shape

    @property
    def weight(self) -> WeightFacts:
        return WeightFacts(self.dense_shape, self.held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ W.T + bias`.

        Args:
            x (`Tensor`): shape (..., in); of another dtype than the weight's, it is converted first.

        Returns:
            `Tensor`: shape (..., out), of the weight's dtype; under autocast, of autocast's.

        Raises:
            `RuntimeError`: in training mode, if gradients are wanted and there are no adapters; else a backward raises it.
        """
        inner = x.detach() if watched(self, x) else x
        output = self.linear(inner, self._buffers["bias"])
        if torch.is_autocast_enabled(x.device.type):
            output = output.to(torch.get_autocast_dtype(x.device.type))
        return output if inner is x else mark(output, x)

    def extra_repr(self) -> str:
        """End with what to do: PEFT, which asks no module whether it takes adapters, quotes it in its refusal."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{super().extra_repr()}, for inference only: to train it, {ADVICE}; for LoRA beside it, see "
            "optimum_neuronal.lora_for_packed"
        )
