"""Modules with packed weights, whose buffers are named as the tensors in a packed file: their base, and linear layers."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Conv1D

from ..compat.buffer_module import BufferModule, WeightInfo, inherit_hooks
from ..model.find_blocks import HoldsPackedWeight
from .grouped_weight import GroupedWeight, find_kernels
from .ops import ADVICE, sparse_linear
from .packed_weight import FORMAT, STORED, PackedWeight, swapped
from .sparse_matrix import SparseMatrix


MASK, VALUES, OFFSETS = BUFFERS = ("packed_mask", "packed_values", "packed_offsets")
GROUPED = (VALUES, "packed_index", "packed_base", "packed_starts")
AS_LINEAR = ("FalconLinear",)  # subclasses of nn.Linear whose own forward computes the same


class PackedModule(HoldsPackedWeight, BufferModule):
    """A module that holds a packed weight (rows, columns) in the buffers `packed_mask`, `packed_values`, `packed_offsets`.

    Where Triton works, a checked weight is held in `packed_values`, `packed_index`, `packed_base` and `packed_starts`
    instead, as a [`GroupedWeight`]. State dicts are the same. While the module is moved or cast, it has the first layout.
    The weight is on the meta device until it is loaded. The dense parameter has the given shape, whose last two sizes are
    swapped if it is `transposed`.
    """

    suffix = ".weight"  # follows the module's name in the name of the dense parameter

    def __init__(self, matrix: PackedWeight, shape: Sequence[int], transposed: bool):
        super().__init__()
        self.transposed, self.dense_shape = transposed, swapped(shape, transposed)
        self.row_count, self.columns = matrix.row_count, matrix.shape[-1]
        self.passes_gradients = False  # to the input, for adapters
        self.trainable = True  # the dense parameter, `requires_grad`
        self._checked: SparseMatrix | None = None
        self._hold(matrix)
        if not matrix.values.is_meta:
            self.check()

    @property
    def matrix(self) -> SparseMatrix:
        """The packed weight, which shares the buffers. They are checked first if they were replaced."""
        checked, buffers = self._checked, self.held
        if checked is None or checked.values is not buffers[VALUES]:
            return self.check()
        return checked if getattr(checked, "mask", None) is buffers.get(MASK) else self.check()

    @torch.compiler.disable
    def check(self) -> SparseMatrix:
        """Check everything that kernels rely on, and return the weight. Raise `ValueError` for damaged buffers."""
        self.__dict__["_checked"] = None
        self.restore_layout()
        try:
            matrix = PackedWeight.from_stored(self.held, (self.row_count, self.columns), self.dtype)
        except ValueError as error:
            raise ValueError(f"A packed weight cannot be used: {error}. Load the model again.") from error
        self.held[OFFSETS] = matrix.offsets
        if find_kernels(matrix.device) is not None:
            matrix = GroupedWeight.from_packed(matrix)
            self._hold(matrix)
        self.__dict__["_checked"] = matrix
        return matrix

    def restore_layout(self) -> None:
        """Hold the weight as files do, until the next [`check`]."""
        if MASK not in self.held:
            self._hold(self._ungrouped())

    def _ungrouped(self) -> PackedWeight:
        tensors = (self.held[name] for name in GROUPED)
        return GroupedWeight(*tensors, (self.row_count, self.columns)).packed()

    def stored(self) -> dict[str, torch.Tensor]:
        return {} if MASK in self.held else self._ungrouped().stored()

    def _hold(self, weight: SparseMatrix) -> None:
        """Replace the buffers with the tensors of a weight that is not checked yet."""
        for name in {*BUFFERS, *GROUPED} & self.held.keys():
            delattr(self, name)
        for name, tensor in zip(BUFFERS if isinstance(weight, PackedWeight) else GROUPED, weight.tensors()):
            self.register_buffer(name, tensor, persistent=name in (MASK, VALUES))
        self.__dict__["_checked"] = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in BUFFERS and VALUES in self.held:
            self.restore_layout()
            self.__dict__["_checked"] = None
        super().__setattr__(name, value)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ W.T + bias` in the weight's dtype, to which x is converted."""
        passes = self.passes_gradients
        if torch.compiler.is_compiling():
            return torch.ops.optimum_neuronal.packed_linear(x.to(self.dtype), self.tensors(), bias, passes)
        matrix = self.matrix
        return sparse_linear(matrix, x if x.dtype == matrix.dtype else x.to(matrix.dtype), bias, passes)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the weight for a graph of torch.compile."""
        if self._checked is None:
            self.check()
        return tuple(self.held[name] for name in (BUFFERS if MASK in self.held else GROUPED))

    @property
    def dtype(self) -> torch.dtype:
        return self.held[VALUES].dtype

    @property
    def device(self) -> torch.device:
        return self.held[VALUES].device

    @property
    def weight(self) -> WeightInfo:
        """Shape, dtype and device of the dense weight, which models read."""
        return WeightInfo(torch.Size(self.dense_shape), self.dtype, self.device)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense parameter."""
        return self.row_count * self.columns * self.dtype.itemsize

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight in memory."""
        return sum(buffer.nbytes for name, buffer in self.held.items() if name.startswith(STORED))

    def dense(self) -> torch.Tensor:
        """Return the dense parameter, bit-equal, in its layout."""
        dense = self.matrix.to_dense().view(swapped(self.dense_shape, self.transposed))
        return dense.mT.clone(memory_format=torch.contiguous_format) if self.transposed else dense

    def dense_parameter(self) -> nn.Parameter:
        """Return the dense parameter as it was before it was packed."""
        return nn.Parameter(self.dense(), requires_grad=self.trainable)

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}, bytes={self.packed_bytes:,} of {self.dense_bytes:,}"


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


def describe_weight(shape: Sequence[int], dtype: torch.dtype, transposed: bool) -> dict[str, Any]:
    """Return what a file says about a packed weight: format, dense shape, dtype, and `transposed` if it is."""
    facts = {"format": FORMAT, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
    return {**facts, "transposed": True} if transposed else facts


def packed_modules(model: nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """Yield all packed modules of a model with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedModule))


def dense_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of the dense model. Packed weights are made dense one after the other."""
    state = model.state_dict()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedModule):
            for buffer in (MASK, VALUES):
                del state[f"{name}.{buffer}"]
            state[name + module.suffix] = module.dense()
    return state


def allow_gradients(model: nn.Module) -> None:
    """Let gradients flow through packed weights to their inputs, so that adapters can be trained."""
    for _, module in packed_modules(model):
        module.passes_gradients = True
