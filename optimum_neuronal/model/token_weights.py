"""The weights that stand for tokens: the table of token embeddings and the head, which may be one."""

import torch
from transformers import PreTrainedModel

from ..compat import transformers as internals


def token_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Embeddings and head by their names in a checkpoint's files, in their order; tied ones once.

    Args:
        model (`PreTrainedModel`): weights may be on the meta device. One without a head has its embeddings alone.
    """
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    found = {
        id(weight) for module in modules if isinstance(weight := getattr(module, "weight", None), torch.nn.Parameter)
    }
    named = model.named_parameters(remove_duplicate=False)
    return internals.stored_tensors(model, {name: weight for name, weight in named if id(weight) in found})
