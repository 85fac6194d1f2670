"""Makes a sparse model compute with packed weights, in place, and back.

```python
model = sparsify(AutoModelForCausalLM.from_pretrained("llama-70"))
model.generate(...)
densify(model)
```
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.save_pretrained import save_packed_by_default, save_plainly, saves_packed_by_default
from ..checkpoint.sparsity_config import forget_sparsity, record_embedding_bits
from ..common.machine import hand_back_freed
from ..common.validation import check_bits, check_embedding_bits
from ..compat import hf_private
from ..compat.peft import base_model
from ..model.find_blocks import find_decoder
from ..model.packed_modules import packed_modules
from ..model.projections import Decoder
from .conversion import check_conversions, convert_plainly
from .formats.packed_matrix import PackedMatrix
from .formats.quantized import QuantizedWeight
from .formats.quantized_checks import BITS
from .head_packing import keep_tied, pack_head, put_head, unpack_head
from .inference_only import Adapters
from .packed_experts import put_stacks, take_stacks
from .packed_linear import PackedLinear
from .packed_module import take_place
from .packing import has_kernels, keeps_transposed, kept, pack_weight, packable, pays
from .replacing import has_own_forward, replace_module
from .summary import summarize


NOTABLE = 0.01  # share of zeros from which on a weight that the package does not know is named if it stays dense


def sparsify(model: PreTrainedModel, bits: int | None = None, embedding_bits: int | None = None) -> PreTrainedModel:
    """Pack every sparse weight of a model that is smaller so, and free the dense one, one after the other.

    Of each packed weight there are a bitmask and the values that are not zero, and kernels multiply with these: at 70 %
    sparsity in bfloat16 0.37 of the bytes. The model computes the same but for rounding, and everything that only
    computes works with it: `generate`, pipelines, evaluation, torch.compile. It cannot be trained or pruned. Its
    `save_pretrained` writes the packed format (docs/format.md). Packed are linear layers (`nn.Linear`, `Conv1D`) and
    mixtures of experts; what is left dense, and why, tell `model.packing` and the log at level info.

    With `bits` the projections' weights, sparse or not, are rounded to so many bits, with a scale for each row. That takes
    a moment, and loses far more than a [`NeuronALPruner`] with `bits_per_weight`.

    With `embedding_bits` the table of token embeddings and the head are held in 8 bits, with a scale for each row: half of
    the bytes; tied ones stay one.

    Args:
        model (`PreTrainedModel`): however it became sparse; changed in place.
        bits (`int`, *optional*): 2 to 8. None: weights keep their values.
        embedding_bits (`int`, *optional*): 8. None: token embeddings and head stay dense.

    Returns:
        The same model.

    Raises:
        `TypeError`: no model of transformers.
        `ValueError`: quantized, offloaded or with adapters, or nothing gets smaller: the model is dense; or `bits` or
            `embedding_bits` for a model that is packed already, or other bits than there are.
    """
    check_model(model)
    check_bits("bits", bits, list(BITS))
    check_embedding_bits(embedding_bits)
    if (bits, embedding_bits) != (None, None) and next(packed_modules(model), None) is not None:
        raise ValueError(
            "The model is packed already: call optimum_neuronal.densify(model) before few bits are asked for."
        )
    known, shared = projections_of(model), _shared(model)
    head, left_dense = pack_head(model) if embedding_bits is not None else ([], {})
    names = [name for name, module in model.named_modules() if packable(module) or _looks_packable(module)]
    for name in names:
        why = _pack_module(model, name, shared, bits if name in known else None)
        if why is not None and (name in known or _is_notable(model.get_submodule(name))):
            left_dense[name] = why
    finish_packing(model, left_dense, f"Nothing of {type(model).__name__} is smaller packed: its weights are dense. "
                   "Prune it first, with NeuronALPruner or optimum-cli neuronal prune.")  # fmt: skip
    if bits is not None:
        forget_sparsity(model.config)  # few bits have no zeros
    if head:
        record_embedding_bits(model.config, head)
    return model


def densify(model: PreTrainedModel) -> PreTrainedModel:
    """Put dense weights back in the place of packed ones, the same to the bit, one after the other, in place.

    The model can be trained and pruned again, and its adapters merged. It saves in the format in which it did before it was
    packed.

    Args:
        model (`PreTrainedModel`): with packed weights, however it got them; a dense one is left as it is. It may carry
            adapters, or be PEFT's model of one.

    Returns:
        The same model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a model, got {type(model).__name__}.")
    if next(packed_modules(model), None) is None:
        return model
    adapted, model = model, base_model(model)
    unpack_head(model)
    convert_plainly(model)
    names = [name for name, module in packed_modules(model) if isinstance(module, PackedLinear)]
    for name in names:
        linear = cast(PackedLinear, model.get_submodule(name))
        replace_module(model, linear, linear.to_linear())
    stacks = [name for name, _ in packed_modules(model)]
    for name in dict.fromkeys(name.rpartition(".")[0] for name in stacks):
        take_stacks(model.get_submodule(name))
    summary = model.__dict__.pop("packing", None)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not (module is model and summary and summary.saved_packed):
            save_plainly(module)
    return adapted


def check_model(model: PreTrainedModel) -> None:
    """Raise `TypeError` or `ValueError` for a model whose weights cannot be packed."""
    if hasattr(model, "peft_config"):
        raise ValueError("The model carries PEFT adapters: merge them first, with model.merge_and_unload().")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"Expected a transformers PreTrainedModel, got {type(model).__name__}.")
    if hf_private.is_quantized(model):
        raise ValueError("The model is quantized: only floating-point weights can be packed.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "Weights of the model are offloaded (device_map), or on the meta device, but packed weights have to be in "
            "memory: load it without offloading. SparseModelForCausalLM.from_pretrained needs room for the packed model alone."
        )
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise ValueError("The model's weights are spread over processes: load it without tp_plan.")


def finish_packing(model: PreTrainedModel, left_dense: dict[str, str], refusal: str) -> None:
    """Add what follows when all weights are packed: the summary, and how the model saves. Raise if none is packed."""
    if next(packed_modules(model), None) is None:
        raise ValueError(refusal)
    adapters = Adapters()
    for _, module in packed_modules(model):
        vars(module)["adapters"] = adapters
    before = model.__dict__.get("packing")
    saved_packed = saves_packed_by_default(model) if before is None else before.saved_packed
    summarize(model, left_dense, saved_packed)
    hand_back_freed()
    keep_tied(model)
    check_conversions(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            save_packed_by_default(module)


def projections_of(model: PreTrainedModel) -> set[str]:
    """Return the names of the modules that the package would prune, but for packed ones; none if it does not know the family."""
    try:
        projections = find_decoder(model).projections.values()
    except ValueError:
        return set()
    return {p.parent.rpartition(".")[0] if p.expert is not None else p.name for p in projections}


def _shared(model: PreTrainedModel) -> Counter:
    """Return how many parameters begin at an address of memory."""
    return Counter(p.data_ptr() for _, p in model.named_parameters(remove_duplicate=False))


def _looks_packable(module: nn.Module) -> bool:
    """Return True if it holds matrices, and is of a kind that has no packed form."""
    if isinstance(module, nn.Linear):
        return True
    return any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)) and not isinstance(
        module, nn.Conv1d
    )


def _is_notable(module: nn.Module) -> bool:
    weights = [
        p for p in module.parameters(recurse=False) if p.ndim > 1 and p.is_floating_point() and p.is_contiguous()
    ]
    return any(kept(weight) < (1 - NOTABLE) * weight.numel() for weight in weights)


def _pack_module(model: nn.Module, name: str, shared: Counter, bits: int | None) -> str | None:
    """Pack a module's weights in place, or return why it is left dense."""
    module = model.get_submodule(name)
    weights = {key: getattr(module, key) for key in packable(module)}
    if not weights:
        return f"a {type(module).__name__} has no packed form"
    if has_own_forward(module):
        return "its forward was replaced"
    if any(shared[weight.data_ptr()] > 1 for weight in weights.values()):
        return "shares its weight with another module"
    if not all(has_kernels(weight) for weight in weights.values()):
        return f"no kernels for {next(iter(weights.values())).dtype}"
    if not all(weight.is_contiguous() for weight in weights.values()):
        return "its weight is not contiguous"
    transposed = keeps_transposed(module)
    if bits is None and not all(pays(weight, transposed) for weight in weights.values()):
        return "not smaller packed"
    if bits is not None and not all(bool(weight.isfinite().all()) for weight in weights.values()):
        return "holds NaN or infinite values, which cannot be quantised"
    put_packed(model, name, {key: pack_weight(weight, transposed, bits) for key, weight in weights.items()})
    return None


def put_packed(model: nn.Module, name: str, matrices: Mapping[str, PackedMatrix]) -> None:
    """Put packed matrices in the place of a module's parameters.

    Args:
        model (`nn.Module`): that holds the module.
        name (`str`): of a module that [`packable`] knows.
        matrices (`Mapping[str, PackedMatrix]`): by the parameters' names.
    """
    module: Any = model.get_submodule(name)
    if "weight" in matrices:
        packed = PackedLinear(matrices["weight"], module.bias, type(module))
        replace_module(model, module, take_place(packed, module))
    else:
        put_stacks(module, matrices)


def check_quantizable(decoder: Decoder) -> None:
    """Raise `ValueError` for a projection whose module no packed one can take the place of."""
    for name, projection in decoder.projections.items():
        module = projection.module
        if projection.parameter not in packable(module) or has_own_forward(module):
            raise ValueError(
                f"{name} cannot be quantised: a {type(module).__name__} "
                f"{'whose forward was replaced ' if has_own_forward(module) else ''}has no packed form. Leave it out, with "
                f"ignore=['{name.split('.')[-1 if projection.expert is None else -3]}']."
            )


def put_quantized(
    model: PreTrainedModel,
    decoder: Decoder,
    weights: Mapping[str, QuantizedWeight],
    head: Mapping[str, QuantizedWeight],
) -> None:
    """Let a model compute with quantised weights, and save packed from then on.

    Args:
        model (`PreTrainedModel`): changed in place; other projections stay as they are.
        decoder ([`Decoder`]): of the model.
        weights (`Mapping[str, QuantizedWeight]`):
            Projection name -> its weight, shape (out, in). Those of a mixture's experts have the same bits, no steps, and
            are all there.
        head (`Mapping[str, QuantizedWeight]`): name in the files -> weight of token embeddings or head, see [`put_head`].
    """
    put_head(model, head)
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, dict[str, list[QuantizedWeight]]] = {}
    for name, projection in decoder.projections.items():
        if name in weights:
            found.setdefault(names[projection.module], {}).setdefault(projection.parameter, []).append(weights[name])
    for name, parts in found.items():
        put_packed(model, name, {key: QuantizedWeight.joined(rows) for key, rows in parts.items()})
    if next(packed_modules(model), None) is not None:  # not if the head alone was rounded, and has no packed form
        finish_packing(model, {}, "")
