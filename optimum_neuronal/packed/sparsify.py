"""Make a sparse model compute with packed weights, in place, and back."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..common.notes import get_logger
from ..common.torch_state import trim_heap
from ..compat import hf_private
from ..compat.peft import all_adapter_layers, base_model
from ..model.change import packed_bytes
from ..model.sparsity import find_sparsity_config, is_zero, record_sparsity
from ..model.unread_formats import check_formats
from .packed_module import dense_state, is_linear, packed_modules
from .packed_weight import DTYPES, PackedWeight, count_kept
from .replacing import find_packable, put_packed, take_packed


logger = get_logger(__name__)

NOTABLE = 0.01  # share of zeros from which a weight that stays dense is reported


def sparsify(model: PreTrainedModel) -> PreTrainedModel:
    """Pack all weights of a model that are sparse enough to become smaller, in place.

    Each packed weight is a bitmask and the nonzero values, which kernels multiply with: 0.36 of the bytes at 70%
    sparsity in bfloat16. On GPUs, where columns take the place of the bitmask, it is 0.46, and below 36% sparsity more than
    dense. Linear layers (`nn.Linear`, `Conv1D`) and the experts of MoE layers are packed. Outputs are the same up to
    rounding. The model can generate, be evaluated and be compiled, and LoRA can train on top of it. To prune it or to train
    its weights, call [`densify`] first.
    `model.packing` lists the weights that stay dense.

    `model.save_pretrained` writes dense weights; `optimum_neuronal.save_pretrained(..., format="packed")` packed ones.

    Args:
        model (`PreTrainedModel`): a model with zeros, pruned by any tool.

    Returns:
        The same model.

    Raises:
        `TypeError`: it is not a transformers model.
        `ValueError`: it is quantized, offloaded or has adapters, or no weight would become smaller.
    """
    _check_packable(model)
    record_sparsity(model, find_sparsity_config(model))
    places = {name: p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False)}
    # A head may have weights of its own although the config ties it: packed, it could not be loaded.
    tied = hf_private.tied_names(model) & places.keys()
    shared = Counter([*places.values(), *(places[name] for name in tied)])
    reasons = {name: _pack_module(model, name, shared) for name in [name for name, _ in model.named_modules()]}
    if next(packed_modules(model), None) is None:
        check_formats((name for name, _ in model.named_parameters()), type(model).__name__)
        raise ValueError(
            f"No weight of {type(model).__name__} is sparse enough to be smaller packed. Prune the model first, with "
            "NeuronALPruner or optimum-cli neuronal prune."
        )
    left_dense = {name: why for name, why in reasons.items() if why is not None}
    finish_packing(model, left_dense)
    return model


def densify(model: PreTrainedModel) -> PreTrainedModel:
    """Replace packed weights with dense ones, the same bit for bit, in place.

    The model can be trained and pruned again, and its adapters merged. Weights that were frozen when they were packed
    are frozen again. In a model with adapters, all unpacked weights are frozen.

    Args:
        model (`PreTrainedModel`): a packed model; a dense one stays unchanged. It may carry adapters or be a `PeftModel`.

    Returns:
        The same model.
    """
    inner = base_model(hf_private.uncompiled(model))
    before = set(inner.parameters())
    for name in [name for name, _ in packed_modules(inner)]:
        take_packed(inner, name)
    if next(all_adapter_layers(inner), None) is not None:
        for parameter in set(inner.parameters()) - before:
            parameter.requires_grad_(False)
    vars(inner).pop("packing", None)
    if isinstance(getattr(inner, "hf_quantizer", None), DenseSaving):
        del inner.hf_quantizer
    return model


@dataclass(repr=False)
class PackingSummary:
    """What a model holds packed: `model.packing`. It prints as a sentence."""

    packed: int = 0  # weights; a layer of experts has two
    packed_bytes: int = 0
    dense_bytes: int = 0  # that the same weights would take dense
    left_dense: dict[str, str] = field(default_factory=dict)  # modules that stay dense -> why

    def __repr__(self) -> str:
        text = f"{self.packed} weights packed into {self.packed_bytes / 1e6:,.1f} MB instead of {self.dense_bytes / 1e6:,.1f} MB"
        if self.left_dense:
            text += "; left dense: " + ", ".join(f"{name} ({why})" for name, why in self.left_dense.items())
        return text


class DenseSaving(hf_private.PlainQuantizer):
    """The `hf_quantizer` of a packed model, which transformers' `save_pretrained` asks for tensors: dense ones."""

    is_compileable = True  # by `generate`, with a static cache

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return dense_state(model), {}


def _check_packable(model: PreTrainedModel) -> None:
    """Raise `TypeError` or `ValueError` for a model whose weights cannot be packed."""
    if hasattr(model, "peft_config"):
        raise ValueError("The model carries PEFT adapters: merge them first, with model.merge_and_unload().")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"Expected a transformers PreTrainedModel, got {type(model).__name__}.")
    if hf_private.is_quantized(model):
        raise ValueError("The model is quantized: only floating-point weights can be packed.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("Weights of the model are offloaded or on the meta device: load it without offloading.")


def finish_packing(model: PreTrainedModel, left_dense: dict[str, str] | None = None) -> None:
    """Set `model.packing` and log it, and let `model.save_pretrained` write dense weights."""
    modules = [module for _, module in packed_modules(model)]
    sizes = sum(m.packed_bytes for m in modules), sum(m.dense_bytes for m in modules)
    model.packing = PackingSummary(len(modules), *sizes, left_dense or {})
    logger.info(f"{type(model).__name__}: {model.packing}.")
    model.hf_quantizer = DenseSaving(None)
    trim_heap()


def pack_weight(weight: torch.Tensor, transposed: bool = False) -> PackedWeight | None:
    """Pack a weight (out, in) or (experts, out, in), `transposed` (..., in, out); None if that saves no memory."""
    matrix = (weight.mT if transposed else weight).detach()
    shape = torch.Size((matrix.shape[:-1].numel(), matrix.shape[-1]))
    offsets, kept = 8 * (shape[0] + 1), count_kept(weight)  # offsets: in memory, not in files
    if kept + int(is_zero(weight).sum()) > (1 + NOTABLE) * weight.numel():
        logger.warning_once(  # type: ignore[attr-defined]  # transformers adds it
            "Weights of -0.0, which torch.nn.utils.prune makes, stay stored in packed weights: weight.data.add_(0.0) makes "
            "them 0.0."
        )
    if packed_bytes(shape, kept, weight.element_size()) + offsets >= weight.nbytes:
        return None
    return PackedWeight.pack(matrix.reshape(shape))


def _pack_module(model: PreTrainedModel, name: str, shared: Counter) -> str | None:
    """Pack a module's weights in place. Return why they stay dense; None if they are packed or hardly have zeros."""
    module = model.get_submodule(name)
    places = find_packable(module, name)
    weights = {place.path: place.parameter(model) for place in places}
    if not places and not isinstance(module, nn.Conv1d):
        least = 2 if isinstance(module, nn.Linear) else 3
        weights = {key: weight for key, weight in module.named_parameters(recurse=False) if weight.ndim >= least}
    if all(count_kept(weight) > (1 - NOTABLE) * weight.numel() for weight in weights.values()):
        return None
    if not places:
        return f"a {type(module).__name__} has no packed form"
    if any(weight.dtype not in DTYPES for weight in weights.values()):
        return f"no kernels for {next(iter(weights.values())).dtype}"
    if "forward" in vars(module):  # as by accelerate, to move inputs between devices
        return "its forward was replaced"
    if is_linear(type(module)) and "weight" not in dict(module.named_parameters(recurse=False)):
        return "a hook or parametrization computes its weight: make it permanent, as with torch.nn.utils.prune.remove"
    if any(shared[weight.data_ptr()] > 1 for weight in weights.values()):
        return "shares its weight with another module, or the config says so"
    matrices: dict[str, Any] = {p.path: pack_weight(weights[p.path], p.transposed) for p in places}
    if None in matrices.values():
        return "not smaller packed"
    del weights
    for path in list(matrices):
        put_packed(model, path, matrices.pop(path))
    return None
