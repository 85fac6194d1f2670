"""Finds the weights of a model that read and write the residual stream and the attention heads' values."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat import transformers as internals
from ..model.architectures import STREAM
from ..model.projections import Block, Decoder, Projection


ATTENTION_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"
READERS = {  # role -> the norm whose output it reads
    "query": ATTENTION_NORM, "key": ATTENTION_NORM, "value": ATTENTION_NORM, "qkv": ATTENTION_NORM,
    "gate": MLP_NORM, "up": MLP_NORM, "gate_up": MLP_NORM,
}  # fmt: skip
WRITERS = ("output", "down")


@dataclass(frozen=True, eq=False)
class Heads:
    """The projections between which the values of attention heads pass, with nothing but weighted sums over tokens.

    Args:
        writer ([`Projection`]): writes the values: its last `count * size` rows.
        reader ([`Projection`]): reads them; its columns lie head after head.
        count (`int`): number of key-value heads.
        size (`int`): values of a head.
    """

    writer: Projection
    reader: Projection
    count: int
    size: int

    @property
    def rows(self) -> slice:
        """The rows of the writer that hold values."""
        return slice(self.writer.shape[0] - self.count * self.size, None)

    @property
    def group(self) -> int:
        """The number of query heads that share a key-value head."""
        return self.reader.shape[1] // (self.count * self.size)


@dataclass(frozen=True, eq=False)
class BlockParts:
    """What a rotation touches in a block.

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


@dataclass(frozen=True, eq=False)
class RotatedParts:
    """What rotations touch in a model.

    Args:
        decoder ([`Decoder`]): of the model.
        blocks (`Sequence[BlockParts]`): in their order.
        final_norm (`nn.Module`, *optional*): in front of the head. None: only the heads' values are rotated.
    """

    decoder: Decoder
    blocks: Sequence[BlockParts]
    final_norm: nn.Module | None

    @property
    def model(self) -> PreTrainedModel:
        """The whole model."""
        return self.decoder.model

    @property
    def rotates_stream(self) -> bool:
        """True if the residual stream is rotated, and not the heads' values alone."""
        return self.final_norm is not None

    @property
    def unties(self) -> bool:
        """True if the head, which the final norm's weights are folded into, shares its weights with the embeddings."""
        return self.rotates_stream and has_tied_head(self.model)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter that changes, once."""
        yield from {getattr(module, name): None for module, name in self.places()}

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the module and the name of every parameter that changes, experts' several times."""
        if self.rotates_stream:
            for module in (self.final_norm, self.model.get_input_embeddings(), self.model.get_output_embeddings()):
                yield module, "weight"
        for parts in self.blocks:
            weights = [parts.heads.writer, parts.heads.reader, *parts.writers]
            for norm, readers in parts.folds:
                yield norm, "weight"
                weights += readers
            for projection in weights:
                yield projection.module, projection.parameter
                if bias_of(projection) is not None:
                    yield projection.module, "bias"


def has_tied_head(model: PreTrainedModel) -> bool:
    """Return True if head and embeddings share their weights. Offloaded ones are not one parameter even then."""
    head = model.get_output_embeddings().weight
    if head is model.get_input_embeddings().weight or not head.is_meta:
        return head is model.get_input_embeddings().weight
    names = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is head}
    return not names.isdisjoint(internals.tied_names(model))


def bias_of(projection: Projection) -> nn.Parameter | None:
    """Return the bias of a projection, if it has one."""
    return getattr(projection.module, "bias", None) if projection.expert is None else None


def find_parts(decoder: Decoder, unties: bool = True) -> RotatedParts:
    """Return what rotations touch in a model. No weight is read.

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
            f"rotate: it is not known how {name} can be rotated without changing what it computes. Leave rotate out; or, if "
            "its attention adds up values by weights alone, register_architecture(..., Architecture(rotates='heads'))."
        )
    if not decoder.predicts_next_token or model.get_output_embeddings() is None:
        raise ValueError(f"rotate: {name} has no causal language-model head, by which a rotation is checked.")
    if (limit := _clips_values(decoder.config)) is not None:
        raise ValueError(
            f"rotate: {name} clips queries, keys and values at {limit:g} (clip_qkv), and rotated values would be clipped "
            "elsewhere: leave rotate out."
        )
    is_text = model.config.get_text_config(decoder=True) is model.config  # else images write into the stream too
    stream = known == STREAM and is_text and (unties or not has_tied_head(model))
    final_norm = getattr(decoder.module, "norm", None)
    if stream and not _is_rms_norm(final_norm):
        raise ValueError(f"rotate: {name} has no RMS norm named 'norm' behind its blocks, as Llama has.")
    blocks = [_of_block(decoder, block, stream) for block in decoder.blocks]
    if not stream and not any(p.pruned for own in blocks for p in (own.heads.writer, own.heads.reader)):
        raise ValueError(
            f"rotate: of {name} the attention heads alone are rotated, but targets and ignore leave out all projections of "
            "values and of the attention's output: leave rotate out."
        )
    return RotatedParts(decoder, blocks, final_norm if stream else None)


def _clips_values(config: object) -> float | None:
    """Return where attention clips the values of its heads, None if it does not."""
    return getattr(getattr(config, "attn_config", config), "clip_qkv", None)  # MPT has a config for attention


def _of_block(decoder: Decoder, block: Block, stream: bool) -> BlockParts:
    heads = _find_heads(decoder, block)
    if not stream:
        return BlockParts(block, (), (), heads)
    readers: dict[str, list[Projection]] = {ATTENTION_NORM: [], MLP_NORM: []}
    writers = []
    for projection in [*block.projections.values(), *_routers(block, decoder.config.hidden_size)]:
        role = projection.role
        if role in WRITERS:
            writers.append(projection)
        elif role is None or role in READERS:
            readers[MLP_NORM if role is None else READERS[role]].append(projection)
        else:
            raise ValueError(f"rotate: {projection.name} has the role {role!r}, which no rotation is known for.")
    folds = [(getattr(block.module, name, None), found) for name, found in readers.items()]
    if not all(_is_rms_norm(norm) for norm, _ in folds):
        raise ValueError(
            f"rotate: {block.name} has no RMS norms named {ATTENTION_NORM!r} and {MLP_NORM!r}, as Llama has."
        )
    return BlockParts(block, folds, writers, heads)


def _find_heads(decoder: Decoder, block: Block) -> Heads:
    by_role = {p.role: p for p in block.projections.values()}
    writer, reader = by_role.get("value", by_role.get("qkv")), by_role.get("output")
    if writer is None or reader is None:
        raise ValueError(f"rotate: {block.name} has no projections of values and of the attention's output.")
    config, columns = decoder.config, reader.shape[1]
    size = columns // config.num_attention_heads
    shared = writer.shape[0] // size if writer.role == "value" else (writer.shape[0] - columns) // (2 * size)
    return Heads(writer, reader, shared, size)


def _routers(block: Block, hidden_size: int) -> Iterator[Projection]:
    """Yield the matrices that choose experts: they read the stream behind the MLP's norm, and are not pruned."""
    known = {projection.module for projection in block.projections.values()}
    for local, module in block.module.named_modules():
        weight = getattr(module, "weight", None)
        if module not in known and getattr(weight, "ndim", 0) == 2 and weight.shape[1] == hidden_size:
            yield Projection(f"{block.name}.{local}", None, module, pruned=False)


def _is_rms_norm(module: nn.Module | None) -> bool:
    return "RMSNorm" in type(module).__name__ and getattr(module, "bias", None) is None


def neutral_value(norm: nn.Module) -> int:
    """Return the weight with which an RMS norm scales by 1: 1, or 0 where it multiplies by `1 + weight`."""
    probe, ones = copy.copy(norm), torch.ones(norm.weight.shape)
    probe._parameters = {"weight": nn.Parameter(torch.zeros_like(ones), requires_grad=False)}
    return 0 if bool(type(norm).forward(probe, ones).any()) else 1  # past hooks, which would read offloaded weights
