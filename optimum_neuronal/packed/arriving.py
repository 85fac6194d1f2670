"""Packs weights as they arrive: a model whose weights somebody reads, one after the other, never holds them dense.

`from_pretrained` builds a model without weights and sets one parameter after the other. Between the two, modules with a
packed form are given a subclass of their class that packs what is set on them; all else that `from_pretrained` does
(names, conversions, dtypes, devices, ties, what is missing) it does as always.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat import hf_private
from ..model.packed_modules import packed_modules
from .formats.packed_matrix import PackedMatrix
from .formats.sparse import SparseWeight
from .head_packing import put_table
from .packed_embedding import is_embedding
from .packed_tensor import PackedTensor
from .packing import has_kernels, keeps_transposed, pack_weight, packable, pays
from .replacing import has_own_forward
from .sparsify import check_model, finish_packing, projections_of, put_packed


class _Arriving:
    """A mix-in for the class of a module whose weights are still to come; `arrived` has those with a packed form."""

    def __setattr__(self, name: str, value) -> None:
        if isinstance(value, torch.Tensor) and not value.is_meta:
            value = self._take(name, value)
        super().__setattr__(name, value)

    def _take(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return what is to be held instead of a tensor that has been read: itself, unpacked, if it stays dense."""
        arrived: dict[str, PackedMatrix | None] = self.__dict__["arrived"]
        if name in arrived:
            arrived[name] = None
            if hf_private.was_read(value) and has_kernels(value) and _stays_packed(self, value):
                arrived[name] = pack_weight(value, keeps_transposed(self))
                nothing = torch.zeros((), dtype=value.dtype, device=value.device)
                return _like(value, nothing.expand(value.shape))
        return _like(value, value.unpack()) if isinstance(value, PackedTensor) else value


def _stays_packed(module: nn.Module, value: torch.Tensor) -> bool:
    """Return True if a weight is to be held packed: what is quantised already, and a projection's that is smaller so."""
    if isinstance(value, PackedTensor) and not isinstance(value.matrix, SparseWeight):
        return True
    return (
        module.__dict__["packs_sparse"]
        and not isinstance(module, nn.Embedding)
        and pays(value, keeps_transposed(module))
    )


def _like(value: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a parameter, or a buffer, of other data, to be set in the place of the one given."""
    held = nn.Parameter(data, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else data
    return hf_private.as_read(held, like=value)


def pack_arriving(model: PreTrainedModel, sparse: bool = True) -> list[str]:
    """Let the weights of a model that has none be packed as they are set. [`finish_arriving`] follows.

    Args:
        model (`PreTrainedModel`): on the meta device.
        sparse (`bool`): False: only what is quantised stays packed.

    Returns:
        `list[str]`: names of the parameters that will be packed if they are sparse enough.
    """
    names = []
    tied, table = hf_private.tied_names(model), model.get_input_embeddings()
    for name, module in model.named_modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            weights = [weight for weight in packable(module) if f"{name}.{weight}" not in tied]
            weights += ["weight"] if module is table and is_embedding(module) else []
            module.__dict__ |= {"arrived": dict.fromkeys(weights), "packs_sparse": sparse}
            module.__class__ = _arriving(type(module))
            names += [f"{name}.{weight}" for weight in weights if module is not table]
    return names


def finish_arriving(model: PreTrainedModel, sparse: bool = True) -> None:
    """Put packed modules in the place of those whose weights have arrived; what stays dense is as it was.

    Args:
        model (`PreTrainedModel`), sparse (`bool`): as for [`pack_arriving`].

    Raises:
        `ValueError`: some weights are offloaded, or, if sparse ones are to be packed, nothing is smaller so.
    """
    left_dense, tables = {}, []
    for name, module in list(model.named_modules()):
        if not isinstance(module, _Arriving):
            continue
        module.__class__ = type(module).__mro__[2]
        arrived: dict[str, PackedMatrix | None] = module.__dict__.pop("arrived")
        del module.__dict__["packs_sparse"]
        if isinstance(module, nn.Embedding):
            tables += [(module.weight, matrix) for matrix in arrived.values() if matrix is not None]
            continue
        if arrived and all(matrix is not None for matrix in arrived.values()) and not has_own_forward(module):
            put_packed(model, name, arrived)
            continue
        for key, matrix in arrived.items():
            if matrix is not None:  # of a mixture one weight of two, for instance
                shape = getattr(module, key).shape
                setattr(module, key, nn.Parameter(PackedTensor(matrix, shape, keeps_transposed(module)).unpack()))
        left_dense[name] = "its forward was replaced" if has_own_forward(module) else "not smaller packed"
    for weight, matrix in tables:
        put_table(model, weight, matrix)
    if not sparse and next(packed_modules(model), None) is None:
        return
    check_model(model)
    known = projections_of(model) if sparse else set()
    left_dense = {name: why for name, why in left_dense.items() if name in known}
    finish_packing(model, left_dense, "Nothing of the checkpoint is smaller packed: its weights are dense. Load it with "
                   "AutoModelForCausalLM.")  # fmt: skip


def _arriving(kind: type) -> type:
    return type(kind.__name__, (_Arriving, kind), {"__module__": kind.__module__})
