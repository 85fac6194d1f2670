"""Whether rows that vLLM brings are smaller packed."""

import torch

from .formats.packed_matrix import DTYPES
from .formats.sparse import SparseWeight, count_kept, sparse_bytes_in_memory
from .packed_tensor import PackedTensor


def pays(weight: torch.Tensor, transposed: bool) -> bool:
    """Return True if a weight, dense or packed, is smaller packed."""
    if isinstance(weight, PackedTensor) and not isinstance(weight.matrix, SparseWeight):
        return weight.matrix.nbytes < weight.numel() * weight.element_size()
    columns = weight.shape[-2] if transposed else weight.shape[-1]
    kept = weight.matrix.kept if isinstance(weight, PackedTensor) else count_kept(weight)
    shape = (weight.numel() // max(1, columns), columns)
    return sparse_bytes_in_memory(shape, kept, weight.element_size()) < weight.numel() * weight.element_size()


def has_kernels(weight: torch.Tensor) -> bool:
    """Return True if there are kernels for the weight's dtype."""
    return weight.dtype in DTYPES
