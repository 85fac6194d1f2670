"""Decides if a dense weight is to be packed, and packs it: of matrices, of stacks of them, of what is packed already."""

import math

import torch
from torch import nn
from transformers import Conv1D

from ..compat import hf_private
from .formats.packed_matrix import DTYPES, PackedMatrix
from .formats.quantized import QuantizedWeight
from .formats.sparse import SparseWeight, count_kept, sparse_bytes_in_memory
from .packed_experts import is_packable, stack_names
from .packed_linear import is_linear
from .packed_tensor import PackedTensor


def packable(module: nn.Module) -> list[str]:
    """Return the names of a module's parameters that have a packed form: of plain linear layers, and of mixtures of experts."""
    if is_linear(type(module)):
        return ["weight"]
    return stack_names(module) if is_packable(module) else []


def keeps_transposed(module: nn.Module) -> bool:
    """Return True if a packable module keeps its weights as (in, out)."""
    if isinstance(module, nn.Linear):
        return False
    return isinstance(module, Conv1D) or hf_private.is_transposed(module, default=False)


def pays(weight: torch.Tensor, transposed: bool) -> bool:
    """Return True if a weight, dense or packed, is smaller packed.

    Args:
        weight (`Tensor`): shape (..., out, in), or (..., in, out) if transposed.
        transposed (`bool`): True if it is kept so.
    """
    if isinstance(weight, PackedTensor) and not isinstance(weight.matrix, SparseWeight):
        return weight.matrix.nbytes < weight.numel() * weight.element_size()
    columns = weight.shape[-2] if transposed else weight.shape[-1]
    shape = (weight.numel() // max(1, columns), columns)
    held = sparse_bytes_in_memory(shape, kept(weight), weight.element_size())
    return held < weight.numel() * weight.element_size()


def kept(weight: torch.Tensor) -> int:
    """Return how many elements have any bit set."""
    return weight.matrix.kept if isinstance(weight, PackedTensor) else count_kept(weight)


def has_kernels(weight: torch.Tensor) -> bool:
    """Return True if there are kernels for the weight's dtype."""
    return weight.dtype in DTYPES


def pack_weight(weight: torch.Tensor, transposed: bool, bits: int | None = None) -> PackedMatrix:
    """Pack a weight, expert by expert if it is a stack; of a [`PackedTensor`] return its own matrix if that can be.

    Args:
        weight (`Tensor`): shape (out, in), (experts, out, in), or each with its last two dimensions swapped.
        transposed (`bool`): True if they are.
        bits (`int`, *optional*): round it to so many, without a mask. None: a bitmask, and values as they are.

    Returns:
        [`PackedMatrix`]: shape (out, in), or (experts * out, in).
    """
    if isinstance(weight, PackedTensor):
        if weight.transposed == transposed:
            return weight.matrix
        weight = weight.unpack()
    dense = weight.detach()
    matrix = dense.mT if transposed else dense
    matrix = matrix.reshape(math.prod(matrix.shape[:-1]), matrix.shape[-1])
    return SparseWeight.pack(matrix) if bits is None else QuantizedWeight.nearest(matrix, bits)
