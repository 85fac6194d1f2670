"""Finds the weights that a rotation changes: readers and writers of the residual stream and of heads' values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat import hf_private
from ..model.architectures import STREAM
from ..model.projections import Block, Decoder, Projection
from ..model.rows import value_rows


VALUES = ("value", "qkv", "interleaved_qkv", "partitioned_qvk")  # roles with rows of values
ATTENTION_READERS, MLP_READERS = ("query", "key", *VALUES), ("gate", "up", "gate_up")
WRITERS = ("output", "down")
ATTENTION_NORMS = ("input_layernorm", "attention_layernorm")
MLP_NORMS = ("post_attention_layernorm", "feedforward_layernorm")


@dataclass(frozen=True, eq=False)
class Heads:
    """The projections that write and read the values of attention heads. Between them are only sums over tokens."""

    writer: Projection
    rows: torch.Tensor  # the writer's rows of values, head after head: int64, shape (count * size,)
    reader: Projection  # its columns are in the order of the heads
    size: int  # values of a head

    @property
    def count(self) -> int:
        """Number of key-value heads."""
        return len(self.rows) // self.size

    @property
    def group(self) -> int:
        """Number of query heads that share a key-value head."""
        return self.reader.shape[1] // len(self.rows)

    def values_last(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a matrix of the writer's shape with the rows of values last."""
        every = torch.arange(len(matrix))
        order = torch.cat([every[~torch.isin(every, self.rows)], self.rows])
        return matrix if torch.equal(order, every) else matrix[order.to(matrix.device)]


@dataclass(frozen=True, eq=False)
class RotatedBlock:
    """The weights of a block that a rotation changes. `folds` and `writers` are empty if the stream is not rotated."""

    block: Block
    folds: Sequence[tuple[nn.Module, Sequence[Projection]]]  # norms, and the weights that read each, routers included
    writers: Sequence[Projection]  # write into the stream
    heads: Heads

    @cached_property
    def readers(self) -> tuple[Projection, ...]:
        return tuple(projection for _, readers in self.folds for projection in readers)

    @property
    def projections(self) -> list[Projection]:
        """All projections that a rotation changes, each once."""
        return list(dict.fromkeys([*self.readers, *self.writers, self.heads.writer, self.heads.reader]))


@dataclass(frozen=True, eq=False)
class RotatedWeights:
    """The weights of a model that rotations change."""

    decoder: Decoder
    blocks: Sequence[RotatedBlock]
    final_norm: nn.Module | None  # in front of the head; None if only the heads' values are rotated

    @property
    def model(self) -> PreTrainedModel:
        return self.decoder.model

    @property
    def rotates_stream(self) -> bool:
        return self.final_norm is not None

    @property
    def norms(self) -> list[nn.Module]:
        inner = [norm for own in self.blocks for norm, _ in own.folds]
        return inner if self.final_norm is None else [*inner, self.final_norm]

    @property
    def unties(self) -> bool:
        """True if folding the final norm into the head unties it from the embeddings."""
        return self.rotates_stream and has_tied_head(self.model)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter that changes, once."""
        modules = (self.model.get_input_embeddings(), self.model.get_output_embeddings(), *self.norms)
        found = [module.weight for module in modules] if self.rotates_stream else []
        for projection in (projection for own in self.blocks for projection in own.projections):
            found += [projection.owner, bias_of(projection)]
        yield from dict.fromkeys(parameter for parameter in found if parameter is not None)


def has_tied_head(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def bias_of(projection: Projection) -> nn.Parameter | None:
    return getattr(projection.module, "bias", None) if projection.expert is None else None


def find_rotated(decoder: Decoder, unties: bool = True) -> RotatedWeights:
    """Return the weights that rotations of a model change. Without `unties`, the stream of a tied head stays.

    Raise `ValueError` unless the model is a causal RMS-norm decoder with its weights in memory.
    """
    model, rotates = decoder.model, decoder.architecture.rotates
    known = (
        rotates is not None
        and decoder.predicts_next_token
        and decoder.config is model.config  # otherwise images write into the stream too
        and not getattr(decoder.config, "clip_qkv", None)  # rotated values would be clipped elsewhere
        and not any(hf_private.is_offloaded(module) for module in model.modules())
    )
    if not known:
        raise _cannot_rotate(decoder)
    stream = rotates == STREAM and (unties or not has_tied_head(model))
    blocks = [_find_in_block(decoder, block, stream) for block in decoder.blocks]
    return RotatedWeights(decoder, blocks, _find_norm(decoder, decoder.module, ("norm",)) if stream else None)


def _cannot_rotate(decoder: Decoder) -> ValueError:
    return ValueError(
        f"rotate: {type(decoder.model).__name__} (model_type {decoder.config.model_type!r}) cannot be rotated. Only causal "
        "RMS-norm decoders of known families, with their weights in memory, can: set rotate=False."
    )


def _find_in_block(decoder: Decoder, block: Block, stream: bool) -> RotatedBlock:
    heads = _find_heads(decoder, block)
    if not stream:
        return RotatedBlock(block, (), (), heads)
    attention = _find_norm(decoder, block.module, ATTENTION_NORMS)
    mlp = _find_norm(decoder, block.module, MLP_NORMS)
    folds: dict[nn.Module, list[Projection]] = {attention: [], mlp: []}
    writers = []
    for projection in [*block.projections.values(), *_routers(block, decoder.config.hidden_size)]:
        role = projection.role
        if role in WRITERS:
            writers.append(projection)
        elif role in ATTENTION_READERS:
            folds[attention].append(projection)
        elif role is None or role in MLP_READERS:
            folds[mlp].append(projection)
        else:
            raise _cannot_rotate(decoder)
    return RotatedBlock(block, list(folds.items()), writers, heads)


def _find_norm(decoder: Decoder, module: nn.Module, names: Sequence[str]) -> nn.Module:
    norm = next((own for name in names if (own := getattr(module, name, None)) is not None), None)
    if "RMSNorm" not in type(norm).__name__:
        raise _cannot_rotate(decoder)
    return norm


def _find_heads(decoder: Decoder, block: Block) -> Heads:
    by_role = {p.role: p for p in block.projections.values()}
    writer, reader = next((by_role[role] for role in VALUES if role in by_role), None), by_role.get("output")
    if writer is None or reader is None:
        raise _cannot_rotate(decoder)
    rows = value_rows(str(writer.role), writer.shape[0], reader.shape[1], decoder.config)
    return Heads(writer, rows, reader, reader.shape[1] // decoder.config.num_attention_heads)


def _routers(block: Block, hidden_size: int) -> Iterator[Projection]:
    """Yield the matrices that choose experts. They read the stream behind the MLP's norm and are not pruned."""
    known = {projection.module for projection in block.projections.values()}
    for local, module in block.module.named_modules():
        weight = getattr(module, "weight", None)
        if module not in known and getattr(weight, "ndim", 0) == 2 and weight.shape[1] == hidden_size:
            yield Projection(f"{block.name}.{local}", None, module, pruned=False)
