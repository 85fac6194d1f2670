"""Whether a dense weight is to be packed, and its packed form: of matrices, of stacks of them, of what is packed already."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import Conv1D

from ..compat import transformers as internals
from ..formats.bitmask import INTEGERS, rows_bytes
from ..formats.codebooks import check_bits
from ..formats.coded import CodedWeight
from ..formats.packed import PackedWeight
from .coded_rows import check_activations
from .layouts import Rows
from .packed_experts import is_packable, stack_names
from .packed_linear import is_linear
from .packed_rows import DTYPES, PackedRows
from .packed_tensor import PackedTensor


@dataclass(frozen=True)
class ValueFormat:
    """How the kept values of a weight are held as codes of few bits.

    Args:
        bits (`int`): of each: 8, 4, 3 or 2.
        activations (`str`): what a projection's inputs become: `"int8"` or `"bf16"`, as they are.

    Raises:
        `ValueError`: there are no such codes, or no such kernels.
    """

    bits: int
    activations: str

    def __post_init__(self):
        check_bits(self.bits)
        check_activations(self.activations)


def packable(module: nn.Module) -> list[str]:
    """Names of a module's parameters that have a packed form: of plain linear layers, and of mixtures of experts."""
    if is_linear(type(module)):
        return ["weight"]
    return stack_names(module) if is_packable(module) else []


def keeps_transposed(module: nn.Module) -> bool:
    """Whether a packable module keeps its weights as (in, out)."""
    if isinstance(module, nn.Linear):
        return False
    return isinstance(module, Conv1D) or internals.is_transposed(module, default=False)


def pays(weight: torch.Tensor, transposed: bool) -> bool:
    """Whether a weight, dense or packed, is smaller packed.

    Args:
        weight (`Tensor`): shape (..., out, in), or (..., in, out) if transposed.
        transposed (`bool`): whether it is kept so.
    """
    columns = weight.shape[-2] if transposed else weight.shape[-1]
    shape = (weight.numel() // max(1, columns), columns)
    return rows_bytes(shape, kept(weight), weight.element_size()) < weight.numel() * weight.element_size()


def kept(weight: torch.Tensor) -> int:
    """How many elements have any bit set."""
    if isinstance(weight, PackedTensor):
        return weight.rows.kept
    return int(torch.count_nonzero(weight.detach().contiguous().view(-1).view(INTEGERS[weight.element_size()])))


def has_kernels(weight: torch.Tensor) -> bool:
    """Whether there are kernels for the weight's dtype."""
    return weight.dtype in DTYPES


def pack_rows(weight: torch.Tensor, transposed: bool, value: ValueFormat | None = None) -> Rows:
    """The packed rows of a weight, expert by expert if it is a stack; of a [`PackedTensor`] its own if they can be.

    Args:
        weight (`Tensor`): shape (out, in), (experts, out, in), or each with its last two dimensions swapped.
        transposed (`bool`): whether they are.
        value ([`ValueFormat`], *optional*): codes of few bits for the values, of one table for all experts.

    Returns:
        [`PackedRows`] or [`CodedRows`]: shape (out, in), or (experts * out, in).
    """
    if isinstance(weight, PackedTensor) and weight.transposed == transposed:
        return weight.rows
    if value is not None:
        dense = weight.detach()
        coded = CodedWeight.rounded(dense.mT if transposed else dense, value.bits)
        return PackedTensor.of(coded, activations=value.activations).rows
    matrices = [weight] if weight.ndim == 2 else weight.detach().unbind(0)
    return PackedRows.joined([_pack_matrix(matrix, transposed) for matrix in matrices])


def _pack_matrix(matrix: torch.Tensor, transposed: bool) -> PackedRows:
    dense = matrix.unpack() if isinstance(matrix, PackedTensor) else matrix.detach()
    return PackedRows.of(PackedWeight.pack(dense.T if transposed else dense))
