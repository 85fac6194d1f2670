"""Models in memory whose projections are rounded to few bits, without calibration, to time them."""

from transformers import PreTrainedModel

from optimum_neuronal import sparsify
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.replacing import packable_parameter, packable_paths, put_packed
from optimum_neuronal.packed.sparsify import finish_packing


def pack(model: PreTrainedModel, bits: int | None) -> PreTrainedModel:
    """Pack a model with linear layers in place: rounded to `bits`, or with `None` by its zeros."""
    if bits is None:
        return sparsify(model)
    head = model.get_output_embeddings()
    for path in [p for name, m in model.named_modules() if m is not head for p in packable_paths(m, name)]:
        put_packed(model, path, QuantizedWeight.nearest(packable_parameter(model, path), bits))
    finish_packing(model)
    return model
