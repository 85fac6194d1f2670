"""Token embeddings that are held in 8 bits and unpacked row by row as they are asked for, and a head that shares them."""

import copy

import torch
from torch import nn

from .formats.quantized import QuantizedWeight
from .inference_only import ADVICE, REFUSAL, Adapters, mark, watched
from .packed_linear import is_linear
from .packed_module import PackedBuffers, WeightFacts, take_place


SCALED = "ScaledWordEmbedding"  # how classes end whose forward multiplies with their `embed_scale`, and else looks up


def is_embedding(module: nn.Module | None) -> bool:
    """Return True if a module looks rows of its weight up, multiplies them with a number at most, and does nothing else."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    scaled = type(module).__name__.endswith(SCALED) and hasattr(module, "embed_scale")
    return type(module).forward is nn.Embedding.forward or scaled


class _Told(type):
    """Classes that say what to do: `resize_token_embeddings`, which refuses them, quotes no more of a module."""

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__name__}', for inference only: {ADVICE}>"


class PackedEmbedding(PackedBuffers, metaclass=_Told):
    """Computes what the `nn.Embedding` did that it was made of; only for inference.

    Args:
        matrix ([`QuantizedWeight`]): the weight, shape (tokens, features).
        embedding (`nn.Embedding`): in whose place it is; its weight is not looked at.

    Attributes:
        levels, ... (`Tensor`): buffers, those of the matrix.
        weight ([`WeightFacts`]): shape, dtype and device of the weight, for models that ask for these.
        padding_idx (`int`, *optional*): as the embedding had it.
    """

    suffix = ".weight"

    def __init__(self, matrix: QuantizedWeight, embedding: nn.Embedding):
        super().__init__(matrix, transposed=False)
        self.padding_idx = embedding.padding_idx
        scale = (
            getattr(embedding, "embed_scale", None) if type(embedding).forward is not nn.Embedding.forward else None
        )
        if isinstance(scale, torch.Tensor):
            self.register_buffer(
                "embed_scale", scale, persistent="embed_scale" not in embedding._non_persistent_buffers_set
            )
        else:
            self.embed_scale = scale
        self.__dict__["_shell"] = _without_weight(embedding)
        take_place(self, embedding)

    def to_embedding(self) -> nn.Embedding:
        """Return the embedding that it was made of, with the weight that its rows stand for."""
        embedding = _without_weight(self.__dict__["_shell"])
        if "embed_scale" in embedding._buffers:
            embedding._buffers["embed_scale"] = self.embed_scale
        embedding.weight = nn.Parameter(self.dense())
        return take_place(embedding, self)

    @property
    def num_embeddings(self) -> int:
        """Number of tokens."""
        return self.row_count

    @property
    def embedding_dim(self) -> int:
        """Number of features."""
        return self.columns

    @property
    def dense_shape(self) -> tuple[int, int]:
        return self.row_count, self.columns

    @property
    def weight(self) -> WeightFacts:
        return WeightFacts(self.dense_shape, self.held)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of these numbers.

        Args:
            ids (`Tensor` of int): any shape.

        Returns:
            `Tensor`: shape (*ids.shape, features), of the weight's dtype.

        Raises:
            `RuntimeError`: in training mode, if gradients are wanted and there are no adapters: the table would get none.
        """
        if self.training and torch.is_grad_enabled() and not self.adapters:
            raise RuntimeError(REFUSAL)
        found = self.matrix.look_up(ids)
        if self.embed_scale is None:
            return found
        scale = self.embed_scale
        return found * (scale.to(found.dtype) if isinstance(scale, torch.Tensor) else scale)

    def extra_repr(self) -> str:
        """End with what to do, as that of packed linear layers."""
        return (
            f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, {super().extra_repr()}, for "
            f"inference only: to train it, {ADVICE}"
        )


class TiedLinear(nn.Module):
    """A head that multiplies with the rows of the token embeddings, and holds none of its own; only for inference.

    Args:
        embedding ([`PackedEmbedding`]): which has them; not a child, so that a state dict has them once.
        linear (`nn.Linear`): in whose place it is; its weight is not looked at.
    """

    def __init__(self, embedding: PackedEmbedding, linear: nn.Linear):
        super().__init__()
        self.__dict__["embedding"] = embedding
        self.stands_for = type(linear)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())
        take_place(self, linear)

    def to_linear(self, weight: nn.Parameter) -> nn.Module:
        """Return the linear layer that it was made of, with the embeddings' weight."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.__class__ = self.stands_for
        linear.weight = weight
        linear.bias = None if self.bias is None else nn.Parameter(self.bias)
        return take_place(linear, self)

    @property
    def in_features(self) -> int:
        """Number of input features."""
        return self.embedding.columns

    @property
    def out_features(self) -> int:
        """Number of output features: tokens."""
        return self.embedding.row_count

    @property
    def weight(self) -> WeightFacts:
        return self.embedding.weight

    @property
    def adapters(self) -> Adapters:
        """The adapters of the embedding."""
        return self.embedding.adapters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ W.T + bias`, as [`PackedLinear`] computes it."""
        inner = x.detach() if watched(self, x) else x
        output = self.embedding.linear(inner, self.bias)
        if torch.is_autocast_enabled(x.device.type):
            output = output.to(torch.get_autocast_dtype(x.device.type))
        return output if inner is x else mark(output, x)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, tied to the "
            f"token embeddings, for inference only: to train it, {ADVICE}"
        )


def is_head(module: nn.Module | None) -> bool:
    """Return True if a module is a head that can be held in 8 bits: a linear layer that keeps its weight as (out, in)."""
    return isinstance(module, nn.Linear) and is_linear(type(module))


def _without_weight(embedding: nn.Embedding) -> nn.Embedding:
    """Return a shallow copy that has no weight, and dictionaries of its own."""
    shell = copy.copy(embedding)
    shell.__dict__ = {key: value.copy() if isinstance(value, dict) else value for key, value in vars(shell).items()}
    shell._parameters["weight"] = None
    return shell
