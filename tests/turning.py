"""Random rotations, and models in which every norm and bias matters."""

import torch

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.packed.packed_embedding import TiedLinear
from optimum_neuronal.rotation.merging import Rotations
from optimum_neuronal.rotation.rotated_weights import RotatedWeights, find_rotated


def orthogonal(*shape: int) -> torch.Tensor:
    """Random orthogonal matrices of shape (..., n, n), float64."""
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0]


def random_rotations(rotated: RotatedWeights) -> Rotations:
    size = rotated.decoder.config.hidden_size
    heads = [orthogonal(own.heads.count, own.heads.size, own.heads.size) for own in rotated.blocks]
    return Rotations(orthogonal(size, size) if rotated.rotates_stream else None, heads)


def uneven(model):
    """The model with random norm weights and biases, so that wrong folding shows, and larger matrices."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(3)
    return model


def rotated_of(model, **chosen) -> RotatedWeights:
    return find_rotated(find_decoder(model, **chosen))


def logits(model, ids) -> torch.Tensor:
    with inference(model):
        return model(input_ids=ids, use_cache=False).logits.double()


def ties(model) -> tuple:
    """Whether head and embeddings are tied, and what the model's config and list say about it."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    config = model.config.tie_word_embeddings, model.config.get_text_config().tie_word_embeddings
    tied = head.embedding is embeddings if isinstance(head, TiedLinear) else head.weight is embeddings.weight
    return tied, id(head.weight), *config, dict(model.all_tied_weights_keys)
