"""Finds the weights of a model that read and write the residual stream and the attention heads' values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat import hf_private
from ..model.architectures import STREAM, find_architecture
from ..model.projections import Block, Decoder, Projection
from ..model.rows import value_rows
from .norms import ATTENTION_NORMS, FINAL_NORMS, MLP_NORMS, can_be_folded, find_norm, is_norm, removes_mean


VALUES = ("value", "qkv", "interleaved_qkv", "partitioned_qvk")  # roles whose rows, or some of them, hold values
ATTENTION_READERS, MLP_READERS = ("query", "key", *VALUES), ("gate", "up", "gate_up")
WRITERS = ("output", "down")


@dataclass(frozen=True, eq=False)
class Heads:
    """The projections between which the values of attention heads pass, with nothing but weighted sums over tokens.

    Args:
        writer ([`Projection`]): writes the values.
        rows (`Tensor` of int64, shape (count * size,)): the rows of the writer that hold values, head after head.
        reader ([`Projection`]): reads them; its columns lie head after head.
        size (`int`): values of a head.
    """

    writer: Projection
    rows: torch.Tensor
    reader: Projection
    size: int

    @property
    def count(self) -> int:
        """The number of key-value heads."""
        return len(self.rows) // self.size

    def values_last(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a matrix of the writer's shape with its rows in another order: those of values last, head after head."""
        every = torch.arange(len(matrix))
        order = torch.cat([every[~torch.isin(every, self.rows)], self.rows])
        return matrix if torch.equal(order, every) else matrix[order.to(matrix.device)]

    @property
    def group(self) -> int:
        """The number of query heads that share a key-value head."""
        return self.reader.shape[1] // len(self.rows)


@dataclass(frozen=True, eq=False)
class BlockParts:
    """The parts of a block that a rotation touches.

    Args:
        block ([`Block`]): of the decoder.
        folds (`Sequence[tuple[nn.Module, Sequence[Projection]]]`):
            Norm, and the weights that read its output, routers among them; empty if the stream is not rotated.
        writers (`Sequence[Projection]`): the projections that write into the stream; empty if it is not rotated.
        heads ([`Heads`]): of its attention.
    """

    block: Block
    folds: Sequence[tuple[nn.Module, Sequence[Projection]]]
    writers: Sequence[Projection]
    heads: Heads

    @cached_property
    def readers(self) -> tuple[Projection, ...]:
        """The projections that read the stream, routers among them."""
        return tuple(projection for _, readers in self.folds for projection in readers)

    @property
    def pruned(self) -> list[Projection]:
        """The projections that are rotated and to be pruned."""
        turned = {*self.writers, self.heads.writer, self.heads.reader, *self.readers}
        return [projection for projection in self.block.pruned if projection in turned]


@dataclass(frozen=True, eq=False)
class RotatedParts:
    """The parts of a model that rotations touch.

    Args:
        decoder ([`Decoder`]): of the model.
        blocks (`Sequence[BlockParts]`): in their order.
        final_norm (`nn.Module`, *optional*): in front of the head. None: only the heads' values are rotated.
        keeps_ones (`bool`): True if a rotation of the stream must keep the vector of ones, as norms remove the mean.
    """

    decoder: Decoder
    blocks: Sequence[BlockParts]
    final_norm: nn.Module | None
    keeps_ones: bool = False

    @property
    def model(self) -> PreTrainedModel:
        """The whole model."""
        return self.decoder.model

    @property
    def rotates_stream(self) -> bool:
        """True if the residual stream is rotated, and not the heads' values alone."""
        return self.final_norm is not None

    @property
    def norms(self) -> list[nn.Module]:
        """The norms that read the stream, if it is rotated."""
        inner = [norm for own in self.blocks for norm, _ in own.folds]
        return inner if self.final_norm is None else [*inner, self.final_norm]

    @property
    def embeddings(self) -> list[nn.Embedding]:
        """The embeddings that write into the stream in front of the blocks: of tokens, and of positions if they are learned."""
        others = (module for module in self.decoder.module.children() if isinstance(module, nn.Embedding))
        return list(dict.fromkeys([self.model.get_input_embeddings(), *others]))

    @property
    def entrance(self) -> nn.Linear | None:
        """The linear layer by which images or sounds enter the stream, if it is rotated and the model reads any."""
        return _find_entrance(self.model) if self.rotates_stream else None

    @property
    def unties(self) -> bool:
        """True if the head, which the final norm's weights are folded into, shares its weights with the embeddings."""
        return self.rotates_stream and has_tied_head(self.model)

    @property
    def untied_bytes(self) -> int:
        """Bytes of the head by which the model grows if it is untied. Offloaded, head and embeddings are two already."""
        head = self.model.get_output_embeddings().weight
        grows = self.unties and head is self.model.get_input_embeddings().weight
        return head.numel() * head.element_size() if grows else 0

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter that changes, once."""
        yield from {getattr(module, name): None for module, name in self.places()}

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the module and the name of every parameter that changes, experts' several times."""
        if self.rotates_stream:
            for module in (*self.embeddings, self.model.get_output_embeddings()):
                yield module, "weight"
            others = self.norms if self.entrance is None else [*self.norms, self.entrance]
            for module in others:
                yield from ((module, name) for name, _ in module.named_parameters())
        for parts in self.blocks:
            for projection in [parts.heads.writer, parts.heads.reader, *parts.writers, *parts.readers]:
                yield projection.module, projection.parameter
                if bias_of(projection) is not None:
                    yield projection.module, "bias"


def has_tied_head(model: PreTrainedModel) -> bool:
    """Return True if head and embeddings share their weights. Offloaded ones are not one parameter even then."""
    head = model.get_output_embeddings().weight
    if head is model.get_input_embeddings().weight or not head.is_meta:
        return head is model.get_input_embeddings().weight
    names = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is head}
    return not names.isdisjoint(hf_private.tied_names(model))


def bias_of(projection: Projection) -> nn.Parameter | None:
    """Return the bias of a projection, if it has one."""
    return getattr(projection.module, "bias", None) if projection.expert is None else None


def find_parts(decoder: Decoder, unties: bool = True) -> RotatedParts:
    """Return what rotations touch in a model. Of its weights those of norms with biases alone are read.

    The stream stays where a norm cannot be folded, see [`can_be_folded`].

    Args:
        decoder ([`Decoder`]): of the model.
        unties (`bool`): False to rotate the heads' values alone where head and embeddings share their weights.

    Raises:
        `ValueError`: it is not known how the model could be rotated.
    """
    model, known = decoder.model, decoder.architecture.rotates
    name = f"{type(model).__name__} (model_type {decoder.config.model_type!r})"
    if known is None:
        raise ValueError(
            f"rotate: it is not known how {name} can be rotated without changing what it computes. Set rotate=False; or, if "
            "its attention adds up values by weights alone, register_architecture(..., Architecture(rotates='heads'))."
        )
    if not decoder.predicts_next_token or model.get_output_embeddings() is None:
        raise ValueError(f"rotate: {name} has no causal language-model head, by which a rotation is checked.")
    if (limit := _clips_values(decoder.config)) is not None:
        raise ValueError(
            f"rotate: {name} clips queries, keys and values at {limit:g} (clip_qkv), and rotated values would be clipped "
            "elsewhere: set rotate=False."
        )
    stream = _may_turn_stream(decoder, unties)
    blocks = [_of_block(decoder, block, stream) for block in decoder.blocks]
    parts = RotatedParts(decoder, blocks, _find_final_norm(decoder) if stream else None)
    if not all(can_be_folded(norm) for norm in parts.norms):
        parts = RotatedParts(decoder, [replace(own, folds=(), writers=()) for own in blocks], None)
    if not parts.rotates_stream and not any(own.pruned for own in parts.blocks):
        raise ValueError(
            f"rotate: of {name} the attention heads alone are rotated, but targets and ignore leave out all projections of "
            "values and of the attention's output: set rotate=False."
        )
    return replace(parts, keeps_ones=any(removes_mean(norm, decoder.config.hidden_size) for norm in parts.norms))


def can_be_rotated(decoder: Decoder) -> bool:
    """Return True if [`find_parts`] knows how, without untying the head from the embeddings."""
    try:
        find_parts(decoder, unties=False)
    except ValueError:
        return False
    return True


def _may_turn_stream(decoder: Decoder, unties: bool) -> bool:
    """Return True if nothing but embeddings and blocks writes into the stream, and norms alone read it."""
    model, config = decoder.model, decoder.config
    embeddings = model.get_input_embeddings().weight
    return (
        decoder.architecture.rotates == STREAM
        and (config is model.config or _find_entrance(model) is not None)  # else images write into the stream unseen
        and (unties or not has_tied_head(model))
        and getattr(config, "do_layer_norm_before", True)  # of OPT: else norms are behind attention and MLP
        and embeddings.shape[1] == config.hidden_size  # of OPT: else two more matrices lead in and out
    )


def _find_entrance(model: PreTrainedModel) -> nn.Linear | None:
    """Return the linear layer by which images or sounds enter the stream; None if there is none, or it is not known."""
    end = find_architecture(model.config.model_type).entrance
    named = model.named_modules() if end else ()
    found = [module for name, module in named if name.endswith(f".{end}") and isinstance(module, nn.Linear)]
    return found[0] if len(found) == 1 else None


def _find_final_norm(decoder: Decoder) -> nn.Module:
    norm = find_norm(decoder.module, FINAL_NORMS)
    if norm is None or not is_norm(norm):
        raise ValueError(
            f"rotate: {type(decoder.model).__name__} has no RMS or layer norm behind its blocks: expected one that has a name "
            f"of {', '.join(FINAL_NORMS)}."
        )
    return norm


def _clips_values(config: object) -> float | None:
    """Return where attention clips the values of its heads, None if it does not."""
    return getattr(getattr(config, "attn_config", config), "clip_qkv", None)  # MPT has a config for attention


def _of_block(decoder: Decoder, block: Block, stream: bool) -> BlockParts:
    heads = _find_heads(decoder, block)
    if not stream:
        return BlockParts(block, (), (), heads)
    attention = find_norm(block.module, ATTENTION_NORMS)
    mlp = find_norm(block.module, MLP_NORMS) or attention  # one norm in front of both
    folds: dict[nn.Module | None, list[Projection]] = {attention: [], mlp: []}
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
            raise ValueError(f"rotate: {projection.name} has the role {role!r}, which no rotation is known for.")
    if not all(is_norm(norm) for norm in folds):
        raise ValueError(
            f"rotate: {block.name} has no RMS or layer norms in front of attention and MLP: expected names of "
            f"{', '.join(ATTENTION_NORMS)}, and of {', '.join(MLP_NORMS)} if there are two."
        )
    return BlockParts(block, list(folds.items()), writers, heads)


def _find_heads(decoder: Decoder, block: Block) -> Heads:
    by_role = {p.role: p for p in block.projections.values()}
    writer, reader = next((by_role[role] for role in VALUES if role in by_role), None), by_role.get("output")
    if writer is None or reader is None:
        raise ValueError(f"rotate: {block.name} has no projections of values and of the attention's output.")
    rows = value_rows(str(writer.role), writer.shape[0], reader.shape[1], decoder.config)
    return Heads(writer, rows, reader, reader.shape[1] // decoder.config.num_attention_heads)


def _routers(block: Block, hidden_size: int) -> Iterator[Projection]:
    """Yield the matrices that choose experts: they read the stream behind the MLP's norm, and are not pruned."""
    known = {projection.module for projection in block.projections.values()}
    for local, module in block.module.named_modules():
        weight = getattr(module, "weight", None)
        if module not in known and getattr(weight, "ndim", 0) == 2 and weight.shape[1] == hidden_size:
            yield Projection(f"{block.name}.{local}", None, module, pruned=False)
