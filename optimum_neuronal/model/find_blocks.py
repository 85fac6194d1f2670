"""Finds a model's decoder blocks and their projections. Weights that it does not understand raise an error."""

from collections.abc import Sequence

import regex
from torch import nn
from transformers import Conv1D, PreTrainedConfig, PreTrainedModel

from ..compat import hf_private
from .architectures import MLP_ENTRIES, Architecture, find_architecture
from .experts import expert_projections
from .projections import Block, Decoder, Experts, Projection, pattern_of
from .unread_formats import check_formats


class Patterns:
    """The user's `targets` and `ignore`. Notes which patterns have matched no name."""

    def __init__(self, targets: Sequence[str] | None, ignore: Sequence[str] | None):
        self.targets, self.ignore = targets, ignore or ()
        self.unmatched = {*(targets or ()), *self.ignore}

    def choose(self, name: str) -> bool | None:
        """Return True if a name is targeted, False if it is left out, None if the user said nothing about it."""
        targeted = None if self.targets is None else self._matches(self.targets, name)
        return False if self._matches(self.ignore, name) else targeted

    def _matches(self, patterns: Sequence[str], name: str) -> bool:
        # Not of `re`, which searches for hours with a pattern such as "([a-z.]+)+#" from another's model card.
        matching = [pattern for pattern in patterns if regex.search(pattern, name)]
        self.unmatched.difference_update(matching)
        return bool(matching)

    def check(self, model: nn.Module, count: int) -> None:
        """Raise `ValueError` if a pattern matched nothing, or if no projection is to be pruned."""
        for name, _ in model.named_modules():  # ignoring a router or lm_head is not a mistake
            self._matches(self.ignore, name)
        if self.unmatched or not count:
            why = (
                f"{sorted(self.unmatched)} match no projection" if self.unmatched else "no projection is left to prune"
            )
            raise ValueError(
                f"With targets={self.targets} and ignore={self.ignore}, {why}. Expected regular expressions for names such "
                "as 'model.layers.0.mlp.up_proj'."
            )


def check_kind(model_class: type[PreTrainedModel] | None, config: PreTrainedConfig) -> None:
    """Raise `ValueError` unless a model reads text. None, for a class with its own code, passes."""
    name = config.model_type if model_class is None else model_class.__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder ({config.model_type}): only decoders, and encoders such as BERT, can be pruned."
        )
    read = getattr(model_class, "main_input_name", "input_ids")
    if read != "input_ids" and config.get_text_config(decoder=True) is config:
        raise ValueError(f"{name} reads {read!r}: only models that read token ids can be pruned.")


def find_decoder(
    model: PreTrainedModel,
    targets: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    strict: bool = True,
) -> Decoder:
    """Find the blocks of a model and the projections to prune in them.

    The blocks are the largest `ModuleList` in the decoder whose modules must not be split (`unsplit_modules`), or else
    the largest one. `targets` and `ignore` are regular expressions that are searched in full module names. Without targets,
    every matrix in a block must have a known name (`architectures`), or match `ignore`. Others raise `ValueError`,
    or are left out unless it is `strict`. A pattern that matches nothing raises `ValueError` too.
    """
    if masked := [name for name, _ in model.named_parameters() if name.endswith("_orig")]:
        check_formats(masked, type(model).__name__)
    config = model.config.get_text_config(decoder=True)
    architecture, wanted = find_architecture(config.model_type), Patterns(targets, ignore)
    list_name, modules = block_list(model)
    unknown: dict[str, str] = {}
    blocks = [
        _make_block(f"{list_name}.{index}", module, architecture, wanted, unknown)
        for index, module in enumerate(modules)
    ]
    if unknown and strict:
        raise ValueError(
            f"Matrices with unknown names or classes: {', '.join(unknown.values())}. Leave them out with "
            f"ignore={list(unknown)}, name those that are an nn.Linear in targets, or describe their family with "
            "optimum_neuronal.register_architecture."
        )
    wanted.check(model, sum(len(block.pruned) for block in blocks))
    return Decoder(_innermost_model(model, list_name), blocks, architecture, config, model)


def find_all_projections(model: PreTrainedModel) -> Decoder:
    """Find the blocks of a model and all projections in them, as far as they are known or linear layers."""
    return find_decoder(model, [""], strict=False)


def block_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name of the decoder's list of blocks in the model, and the list."""
    model_type = model.config.get_text_config(decoder=True).model_type
    architecture = find_architecture(model_type)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or not any(isinstance(module, nn.ModuleList) for module in decoder.modules()):
        decoder = model  # get_decoder() of some encoders is the last matrix of the head
    inside = {decoder.get_submodule(architecture.blocks)} if architecture.blocks else set(decoder.modules())
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if module in inside and isinstance(module, nn.ModuleList) and len(module)
    ]
    unsplit = hf_private.unsplit_modules(model)
    named = [(name, module) for name, module in lists if type(module[0]).__name__ in unsplit]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList of decoder blocks. Name it with "
            f"optimum_neuronal.register_architecture({model_type!r}, Architecture(blocks='...'))."
        )
    return max(named or lists, key=lambda item: len(item[1]))


def _innermost_model(model: PreTrainedModel, name: str) -> nn.Module:
    """Return the smallest model around a module, without the language-model head, which is slow."""
    parents = [name.rsplit(".", levels)[0] for levels in range(1, name.count(".") + 1)]
    modules = (model.get_submodule(parent) for parent in parents)
    return next((module for module in modules if isinstance(module, PreTrainedModel)), model)


def _make_block(
    name: str, module: nn.Module, architecture: Architecture, wanted: Patterns, unknown: dict[str, str]
) -> Block:
    """Return a block. Note in `unknown` what it does not understand: pattern of the name -> description."""
    projections: list[Projection] = []
    experts: dict[str, Experts] = {}
    for local, child in module.named_modules():
        for key, parameter in child.named_parameters(recurse=False):
            if parameter.ndim < 2 or _is_no_projection(child, key):
                continue
            full = f"{name}.{local}".removesuffix(".")
            of_parameter = _find_projections(full, local, child, key, architecture, wanted)
            if of_parameter is None:
                named = full if key == "weight" else f"{full}.{key}"
                unknown.setdefault(
                    pattern_of(named), f"{named} ({type(child).__name__}, shape {tuple(parameter.shape)})"
                )
                continue
            if of_parameter and of_parameter[0].expert is not None:
                experts[full] = Experts(full, child, architecture.stacked_experts)
            projections += of_parameter
    for full, layer in experts.items():
        members = [projection for projection in projections if projection.module is layer.module]
        first = sum(projection.role in MLP_ENTRIES for projection in members)
        if 2 * first != len(members) and any(projection.pruned for projection in members):
            sizes = f"{first} first and {len(members) - first} last weights of experts"
            unknown.setdefault(pattern_of(full).replace("$", r"\."), f"{full} ({sizes})")
    return Block(name, module, {projection.name: projection for projection in projections}, list(experts.values()))


def _is_no_projection(module: nn.Module, parameter: str) -> bool:
    """Return True for convolutions, embeddings, norms with a weight for every head, and biases of experts."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Embedding)
    return isinstance(module, kinds) or "Norm" in type(module).__name__ or parameter.endswith("bias")


def _find_projections(
    full: str, local: str, module: nn.Module, key: str, architecture: Architecture, wanted: Patterns
) -> list[Projection] | None:
    """Return the projections in the parameter `key` of a module: one, one per expert, or none if it is left out.

    None: it has an unknown name or class.
    """
    weight = getattr(module, key)
    known, role = architecture.find_role(local if key == "weight" else f"{local}.{key}")
    if known and role is None:
        return []
    if weight.ndim == 3 and role in ("down", *MLP_ENTRIES):  # (experts, ., .)
        return expert_projections(full, module, key, role, architecture, lambda name: wanted.choose(name) is not False)
    named = full if key == "weight" else f"{full}.{key}"
    chosen = wanted.choose(named)
    if isinstance(module, (nn.Linear, Conv1D)) and (role or chosen):
        return [Projection(full, role, module, chosen is not False, transposed=isinstance(module, Conv1D))]
    return None if chosen is not False else []


class HoldsPackedWeight:
    """A module whose weight is packed. Code that prunes recognizes it by this, without importing what computes with it."""


def count_packed(model: nn.Module) -> int:
    return sum(isinstance(module, HoldsPackedWeight) for module in model.modules())
