"""Finds a model's decoder blocks and their prunable projections, and refuses what it does not understand."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .architectures import (
    DOWN_INPUT,
    MLP_INPUT,
    NEXT_INPUT,
    OUTPUT_INPUT,
    Architecture,
    RowGroup,
    find_architecture,
    row_groups,
)


READERS = {  # place -> roles of the projections that read it
    OUTPUT_INPUT: ("output",),
    MLP_INPUT: ("gate", "up", "gate_up"),
    DOWN_INPUT: ("down",),
    NEXT_INPUT: ("query", "qkv"),
}


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear projection inside a decoder block.

    Args:
        name (`str`): its full name in the model: `"model.layers.0.self_attn.q_proj"`.
        role (`str`): what it does in its block, see [`Architecture`].
        module (`nn.Module`): an `nn.Linear`, or a `Conv1D`, which keeps its weight transposed.
        pruned (`bool`): False if the user's `targets` and `ignore` leave it out.
    """

    name: str
    role: str
    module: nn.Module
    pruned: bool

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of a tensor of the module's layout as (out, in), and back."""
        return tensor.T if isinstance(self.module, Conv1D) else tensor

    @property
    def weight(self) -> torch.Tensor:
        """The weight as a view of shape (out, in)."""
        return self.matrix(self.module.weight.data)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of output and input features."""
        return tuple(self.weight.shape)


@dataclass(frozen=True, eq=False)
class Block:
    """A decoder block: its full name, its module, and its projections by name, in the order of the module."""

    name: str
    module: nn.Module
    projections: Mapping[str, Projection]

    @property
    def pruned(self) -> list[Projection]:
        """The projections that are to be pruned."""
        return [projection for projection in self.projections.values() if projection.pruned]

    @property
    def pruned_names(self) -> list[str]:
        """Their full names."""
        return [projection.name for projection in self.pruned]

    def reader(self, place: str) -> Projection | None:
        """The first projection whose input is `place`, one of the places of `architectures`."""
        return next((p for p in self.projections.values() if p.role in READERS[place]), None)


@dataclass(frozen=True, eq=False)
class Decoder:
    """The part of a model that is pruned: its stack of blocks, with what the row step must know of its shape."""

    module: nn.Module
    blocks: Sequence[Block]
    architecture: Architecture
    config: object

    @property
    def projections(self) -> dict[str, Projection]:
        """All projections to prune, by full name, from the first block to the last."""
        return {projection.name: projection for block in self.blocks for projection in block.pruned}

    def place_fed_by(self, projection: Projection) -> str:
        """The place whose features the projection's rows feed."""
        return self.architecture.feeds(projection.role, self.config)

    def row_groups(self, block: Block, projection: Projection) -> list[RowGroup]:
        """The projection's rows by part, with the features that they feed. Raises `ValueError` if unknown."""
        place = self.place_fed_by(projection)
        reader = None if place == NEXT_INPUT else block.reader(place)
        if place != NEXT_INPUT and reader is None:
            raise ValueError(f"{block.name} has no projection that reads what {projection.name} writes: use 'block'.")
        fed = projection.shape[0] if reader is None else reader.shape[1]
        heads = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        layout = self.architecture.qkv_layout
        try:
            return row_groups(projection.role, layout, projection.shape[0], fed, heads, kv_heads)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"The row step does not understand {projection.name}: {error}. Use steps='block', or leave it out "
                f"with ignore=[{re.escape(projection.name)!r}]."
            ) from error


def find_decoder(
    model: PreTrainedModel, targets: Sequence[str] | None = None, ignore: Sequence[str] | None = None
) -> Decoder:
    """Finds the blocks of a model and the projections to prune in them.

    The blocks are, in the model's decoder, the largest `ModuleList` of modules that the model says must not be split
    (`_no_split_modules`). Every matrix in a block must be known by its role or be left out by the user.

    Args:
        model (`PreTrainedModel`): a language model with its weights in memory.
        targets (`Sequence[str]`, *optional*):
            Regular expressions, searched in full module names; only projections that match one are pruned.
        ignore (`Sequence[str]`, *optional*): the same, for projections that are left out.

    Returns:
        [`Decoder`]

    Raises:
        `ValueError`: no blocks, a weight that is not understood, or a pattern that matches nothing.
    """
    decoder, prefix = _decoder_module(model)
    config = model.config.get_text_config(decoder=True)
    architecture = find_architecture(config.model_type)
    list_name, modules = _block_list(model, decoder)
    wanted = _Selection(targets, ignore)
    blocks = [
        _make_block(f"{prefix}{list_name}.{index}", module, architecture, wanted)
        for index, module in enumerate(modules)
    ]
    wanted.check_matches()
    if not any(block.pruned for block in blocks):
        raise ValueError(f"targets={targets} and ignore={ignore} leave no projection to prune.")
    return Decoder(decoder, blocks, architecture, config)


class _Selection:
    """The user's `targets` and `ignore`, with a note of the patterns that matched something."""

    def __init__(self, targets: Sequence[str] | None, ignore: Sequence[str] | None):
        self.targets, self.ignore = targets, ignore or ()
        self.unmatched = {*(targets or ()), *self.ignore}

    def ignores(self, name: str) -> bool:
        return self._matches(self.ignore, name)

    def takes(self, name: str) -> bool:
        targeted = self.targets is None or self._matches(self.targets, name)
        return not self.ignores(name) and targeted

    def _matches(self, patterns: Sequence[str], name: str) -> bool:
        matching = [pattern for pattern in patterns if re.search(pattern, name)]
        self.unmatched.difference_update(matching)
        return bool(matching)

    def check_matches(self) -> None:
        if self.unmatched:
            raise ValueError(
                f"These patterns of targets and ignore match no projection: {sorted(self.unmatched)}. They are "
                "regular expressions over full names such as 'model.layers.0.self_attn.q_proj'."
            )


def _decoder_module(model: PreTrainedModel) -> tuple[nn.Module, str]:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    decoder = model if decoder is None else decoder
    name = next(name for name, module in model.named_modules() if module is decoder)
    return decoder, f"{name}." if name else ""


def _block_list(model: PreTrainedModel, decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [
        (name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and type(module[0]).__name__ in names
    ]
    if not lists:
        raise ValueError(
            f"No decoder blocks found in {type(model).__name__}: it needs a ModuleList whose elements' class is named "
            f"in the model's _no_split_modules, which is {sorted(names) or 'empty'}."
        )
    return max(lists, key=lambda item: len(item[1]))


def _make_block(name: str, module: nn.Module, architecture: Architecture, wanted: _Selection) -> Block:
    projections = {}
    for local, child in module.named_modules():
        full = f"{name}.{local}"
        if not any(parameter.ndim > 1 for parameter in child.parameters(recurse=False)):
            continue
        role = architecture.role(local) if isinstance(child, (nn.Linear, Conv1D)) else None
        if role is not None:
            projections[full] = Projection(full, role, child, wanted.takes(full))
        elif not wanted.ignores(full):
            raise ValueError(
                f"{full} ({type(child).__name__}) is not understood: leave it out with ignore=[{re.escape(local)!r}], "
                "or describe its family with optimum_neuronal.architectures.register_architecture."
            )
    return Block(name, module, projections)


def check_weights(projections: Mapping[str, Projection]) -> None:
    """Raises `ValueError` unless every projection holds finite floating-point weights of its own, in memory."""
    owners: dict[int, str] = {}
    for name, projection in projections.items():
        weight = projection.module.weight
        if weight.is_meta:
            raise ValueError(f"The weights of {name} are on the meta device or on disk: load the model into memory.")
        if not weight.is_floating_point():
            raise ValueError(f"The weights of {name} have dtype {weight.dtype}: load the model without quantization.")
        other = owners.setdefault(weight.data_ptr(), name)
        if other != name:
            raise ValueError(f"{name} shares its weights with {other}: tied projections cannot be pruned.")
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"The weights of {name} contain NaN or infinity: the checkpoint is damaged.")


def check_model(model: PreTrainedModel) -> None:
    """Raises `TypeError` or `ValueError` for a model of a kind that cannot be pruned: see the messages."""
    if hasattr(model, "peft_config"):
        raise ValueError("The model carries PEFT adapters: merge them first with model.merge_and_unload().")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"Expected a transformers PreTrainedModel, got {type(model).__name__}.")
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None or getattr(model, "is_quantized", False):
        raise ValueError("The model is quantized: prune the original model, then quantize the sparse one.")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model: only decoder models can be pruned.")


@contextmanager
def trial_weights(projections: Sequence[Projection], mask_of: Callable[[Projection], torch.Tensor]) -> Iterator[None]:
    """While the context lasts, the projections compute with the weights under their masks set to zero.

    Args:
        projections (`Sequence[Projection]`): whose weights are replaced; the original tensors are put back.
        mask_of: projection -> boolean mask of shape (out, in), True where pruned.
    """
    originals = []
    try:
        for projection in projections:
            original = projection.module.weight.data
            trial = torch.where(projection.matrix(mask_of(projection)), 0, original)  # faster than masked_fill
            originals.append((projection.module.weight, original))
            projection.module.weight.data = trial
        yield
    finally:
        for parameter, original in originals:
            parameter.data = original
