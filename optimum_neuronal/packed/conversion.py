"""Conversions of a model with packed weights to another dtype: refused before any of its parts is converted."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .packed_module import PackedBuffers


class _CheckedApply:
    """Replaces `_apply`, by which `to`, `double` and others convert a model, part after part.

    A packed part that refuses a dtype would be asked after embeddings and norms were converted. Unlike a bound method it
    is copied and pickled with the model.

    Args:
        model (`PreTrainedModel`): with packed parts.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __call__(self, function: Callable, recurse: bool = True) -> nn.Module:
        for module in self.model.modules():
            if isinstance(module, PackedBuffers):
                module.check_conversion(function)
        return type(self.model)._apply(self.model, function, recurse)


def check_conversions(model: PreTrainedModel) -> None:
    """Let a model refuse a dtype that its packed weights cannot have before anything is converted."""
    _of_parts(model, lambda part: part.__dict__.update(_apply=_CheckedApply(part)))


def convert_plainly(model: nn.Module) -> None:
    """Take back [`check_conversions`]."""
    _of_parts(model, lambda part: part.__dict__.pop("_apply", None))


def _of_parts(model: nn.Module, change: Callable[[PreTrainedModel], Any]) -> None:
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            change(part)
