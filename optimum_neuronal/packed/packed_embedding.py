"""Token embeddings held in 8 bits, whose rows are unpacked when they are looked up, and a head that shares them."""

import torch
from torch import nn

from .formats.quantized import QuantizedWeight
from .ops import ADVICE, REFUSAL
from .packed_linear import autocast, is_linear
from .packed_module import PackedModule, WeightInfo, take_place


SCALED = "ScaledWordEmbedding"  # ending of the classes that look up and then multiply by their `embed_scale`


def is_embedding(module: nn.Module | None) -> bool:
    """Return True if a module looks up rows of its weight and at most multiplies them by a number."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    is_scaled = type(module).__name__.endswith(SCALED) and hasattr(module, "embed_scale")
    return is_scaled or type(module).forward is nn.Embedding.forward


def is_head(module: nn.Module | None) -> bool:
    """Return True if a module is a linear layer with a weight of shape (out, in)."""
    return isinstance(module, nn.Linear) and is_linear(type(module))


class PackedEmbedding(PackedModule):
    """An `nn.Embedding` with a packed weight of shape (tokens, features). It takes the weight of the given one away."""

    def __init__(self, matrix: QuantizedWeight, embedding: nn.Embedding):
        super().__init__(matrix)
        self.num_embeddings, self.embedding_dim = self.row_count, self.columns
        self.padding_idx = embedding.padding_idx
        self.embed_scale, self.rounds_scale = None, False
        if type(embedding).forward is not nn.Embedding.forward:
            scale = embedding.embed_scale
            self.rounds_scale = isinstance(scale, torch.Tensor)  # to the weight's dtype
            self.embed_scale = float(getattr(embedding, "scalar_embed_scale", scale))
        take_place(self, embedding)
        embedding.weight = None
        self.__dict__["dense_module"] = embedding  # not a child

    def to_dense_module(self) -> nn.Embedding:
        """Return the embedding that it was made of, with the unpacked weight."""
        embedding = self.dense_module
        if self.rounds_scale:
            embedding._buffers["embed_scale"] = torch.tensor(self.embed_scale, device=self.device)
        embedding.weight = self.dense_parameter()
        return take_place(embedding, self)

    @property
    def dense_shape(self) -> tuple[int, int]:
        return self.row_count, self.columns

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of token ids, shape (*ids.shape, features). Training without adapters raises `RuntimeError`."""
        if self.training and torch.is_grad_enabled() and not self.passes_gradients:
            raise RuntimeError(REFUSAL)
        found = self.matrix.look_up(ids)
        if self.embed_scale is None:
            return found
        return found * (found.new_tensor(self.embed_scale) if self.rounds_scale else self.embed_scale)

    def extra_repr(self) -> str:
        sizes = f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}"
        return f"{sizes}, {super().extra_repr()}, for inference only: to train it, {ADVICE}"


class TiedLinear(nn.Module):
    """A head that multiplies with the rows of packed token embeddings, and holds no weight of its own."""

    def __init__(self, embedding: PackedEmbedding, linear: nn.Linear):
        super().__init__()
        self.__dict__["embedding"] = embedding  # not a child, so that a state dict has it once
        self.stands_for = type(linear)
        self.in_features, self.out_features = embedding.columns, embedding.row_count
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())
        take_place(self, linear)

    @property
    def weight(self) -> WeightInfo:
        return self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return autocast(self.embedding.linear(x, self.bias))

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, tied to the token embeddings, for inference only: to train it, {ADVICE}"
