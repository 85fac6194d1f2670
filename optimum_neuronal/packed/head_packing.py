"""Token embeddings and head in 8 bits: of a model in memory, and as they are read from a file."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model.packed_modules import packed_modules
from ..model.weight_names import token_weights
from .formats.quantized import QuantizedWeight
from .inference_only import ADVICE
from .packed_embedding import PackedEmbedding, TiedLinear, is_embedding, is_head
from .packed_linear import PackedLinear
from .packed_module import take_place
from .packing import has_kernels
from .replacing import has_own_forward, replace_module


BITS = 8


def pack_head(model: PreTrainedModel) -> tuple[list[str], dict[str, str]]:
    """Put token embeddings and head in 8 bits, in place; tied ones stay one.

    Args:
        model (`PreTrainedModel`): with dense ones.

    Returns:
        `tuple`: names of the weights in files that are held so; and modules that are left dense -> why.
    """
    names = {id(weight): name for name, weight in token_weights(model).items()}
    shared = Counter(p.data_ptr() for _, p in model.named_parameters(remove_duplicate=False))
    packed, left_dense = [], {}
    for weight, modules in _by_weight(model):
        why = _problem(weight, modules, shared[weight.data_ptr()])
        if why is None:
            put_in_8_bits(model, list(modules.values()), QuantizedWeight.nearest(weight, BITS))
            packed.append(names[id(weight)])
        else:
            left_dense |= dict.fromkeys(modules, why)
    return packed, left_dense


def put_head(model: PreTrainedModel, weights: Mapping[str, QuantizedWeight]) -> None:
    """Put quantised weights in the place of token embeddings and head, by their names in files; what has no packed form gets
    the same numbers dense."""
    names = {id(weight): name for name, weight in token_weights(model).items()}
    for weight, _ in _by_weight(model):
        if (name := names.get(id(weight))) in weights:
            put_table(model, weight, weights[name])


def put_in_8_bits(model: nn.Module, modules: list[nn.Module], matrix: QuantizedWeight) -> None:
    """Put a matrix in the place of the weight that these modules have: embeddings, a head, or both."""
    embedding = next((module for module in modules if isinstance(module, nn.Embedding)), None)
    table = None
    if embedding is not None:
        table = PackedEmbedding(matrix, embedding)
        replace_module(model, embedding, table)
    for module in modules:
        if isinstance(module, nn.Linear):
            packed = PackedLinear(matrix, module.bias, type(module)) if table is None else TiedLinear(table, module)
            replace_module(model, module, take_place(packed, module))


def put_table(model: nn.Module, weight: nn.Parameter, matrix: QuantizedWeight) -> None:
    """Put a matrix in the place of a weight of embeddings or head, and of all that share it.

    If any module that has it has no packed form, all get the dense weight instead.
    """
    modules = {name: m for name, m in model.named_modules() if m._parameters.get("weight") is weight}
    others = [m for m in model.modules() if any(p is weight for p in m._parameters.values())]
    if len(others) == len(modules) and _misfit(modules) is None:
        put_in_8_bits(model, list(modules.values()), matrix)
        return
    dense = nn.Parameter(matrix.unpack(), requires_grad=weight.requires_grad)
    for module in others:
        module._parameters |= {name: dense for name, held in module._parameters.items() if held is weight}


def unpack_head(model: PreTrainedModel) -> None:
    """Put dense embeddings back, and a head that is tied to them; a head of its own is a packed linear layer as others."""
    for _, table in list(packed_modules(model)):
        if isinstance(table, PackedEmbedding):
            embedding = table.to_embedding()
            heads = [m for m in model.modules() if isinstance(m, TiedLinear) and m.embedding is table]
            replace_module(model, table, embedding)
            for head in heads:
                replace_module(model, head, head.to_linear(embedding.weight))
    for part in model.modules():
        for name, method in TYING.items():
            if isinstance(vars(part).get(name), method):
                delattr(part, name)


class _Tied:
    """A method of a model that ties its head to its embeddings; a packed head shares the embeddings' matrix already.

    Unlike a bound method it is copied and pickled with the model.

    Args:
        model (`PreTrainedModel`): with a [`TiedLinear`], or the part of such a model that holds the embeddings.
        whole (`PreTrainedModel`): the model.
    """

    def __init__(self, model: PreTrainedModel, whole: PreTrainedModel):
        self.model, self.whole = model, whole

    def check_shared(self, table: nn.Module | None) -> None:
        """Raise `ValueError` if packed heads compute with other embeddings than these."""
        if any(head.embedding is not table for head in self.whole.modules() if isinstance(head, TiedLinear)):
            raise ValueError(f"The head is packed, and tied to the packed token embeddings: to change them, {ADVICE}.")


class _TieWeights(_Tied):
    """Replaces `tie_weights`."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.check_shared(self.model.get_input_embeddings())


class _SetInputEmbeddings(_Tied):
    """Replaces `set_input_embeddings`."""

    def __call__(self, value: nn.Module) -> None:
        self.check_shared(value)


TYING = {"tie_weights": _TieWeights, "set_input_embeddings": _SetInputEmbeddings}


def keep_tied(model: PreTrainedModel) -> None:
    """Refuse changes of embeddings that a packed head shares, and leave them as they are where the head is tied again."""
    if any(isinstance(module, TiedLinear) for module in model.modules()):
        for part in model.modules():
            with suppress(NotImplementedError):  # a part for images may have no embeddings
                if isinstance(part, PreTrainedModel) and isinstance(part.get_input_embeddings(), PackedEmbedding):
                    part.__dict__.update({name: method(part, model) for name, method in TYING.items()})


def _by_weight(model: PreTrainedModel) -> list[tuple[nn.Parameter, dict[str, nn.Module]]]:
    """Return the weights of embeddings and head, each with the modules that have it, by name."""
    found: dict[int, tuple[nn.Parameter, dict[str, nn.Module]]] = {}
    wanted = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if any(module is other for other in wanted) and isinstance(weight, nn.Parameter):
            found.setdefault(id(weight), (weight, {}))[1][name] = module
    return list(found.values())


def _problem(weight: torch.Tensor, modules: dict[str, nn.Module], sharing: int) -> str | None:
    """Return why a weight is left dense."""
    if (why := _misfit(modules)) is not None:
        return why
    if sharing > len(modules):
        return "shares its weight with another module"
    if not has_kernels(weight):
        return f"no kernels for {weight.dtype}"
    if not weight.is_contiguous():
        return "its weight is not contiguous"
    return None if bool(weight.isfinite().all()) else "holds NaN or infinite values, which cannot be quantised"


def _misfit(modules: dict[str, nn.Module]) -> str | None:
    """Return why the modules that share a weight cannot hold it in 8 bits."""
    for module in modules.values():
        if not is_embedding(module) and not is_head(module):
            return f"a {type(module).__name__} has no packed form"
        if has_own_forward(module):
            return "its forward was replaced"
    return None
