"""What a pruner remembers of the models that pass it: which tokenizer and which report are whose."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.calibration import CalibrationSet
from ..report import PruningReport


@dataclass(frozen=True)
class Pruned:
    """A model that was pruned.

    Args:
        report ([`PruningReport`]): of the prune.
        sparsity_config (`Mapping[str, Any]`): what the model's config was given.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): with which the calibration sequences were drawn.
    """

    report: PruningReport
    sparsity_config: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase | None


def check_tokenizer(tokenizer: Any) -> None:
    """Raises `TypeError` unless a tokenizer is one, or where to load it from, or None."""
    one = (
        callable(tokenizer) and hasattr(tokenizer, "save_pretrained") and not isinstance(tokenizer, (type, nn.Module))
    )
    if not (one or tokenizer is None or isinstance(tokenizer, str)):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}: expected what AutoTokenizer.from_pretrained returns, or a name."
        )


class Tokenizers:
    """The tokenizers of models: one for all, or each model's own.

    Args:
        given (`PreTrainedTokenizerBase`, *optional*): for all models. None: each has its own, if any.
    """

    def __init__(self, given: PreTrainedTokenizerBase | None = None):
        self.given = given
        self._own: WeakKeyDictionary[PreTrainedModel, PreTrainedTokenizerBase] = WeakKeyDictionary()
        self._last: PreTrainedTokenizerBase | None = None
        self._drawn: CalibrationSet | None = None

    @property
    def current(self) -> PreTrainedTokenizerBase | None:
        """The one for all, or that of the model that came last."""
        return self._last if self.given is None else self.given

    def of(self, model: PreTrainedModel, drawn: CalibrationSet | None = None) -> PreTrainedTokenizerBase | None:
        """The one for all, the model's own, or the one of the sequences that were drawn last, if these are they."""
        if self.given is not None:
            return self.given
        return self._own.get(model, self._last if drawn is not None and drawn is self._drawn else None)

    def keep(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        drawn: CalibrationSet | None = None,
    ) -> None:
        """Remembers what was loaded for a model, and the sequences that were drawn with it."""
        self._last, self._drawn = tokenizer, drawn
        if tokenizer is not None and tokenizer is not self.given:
            self._own[model] = tokenizer


class PrunedModels:
    """The models that a pruner has pruned, as long as they are in use."""

    def __init__(self):
        self._pruned: WeakKeyDictionary[PreTrainedModel, Pruned] = WeakKeyDictionary()
        self._any = False

    def add(self, model: PreTrainedModel, pruned: Pruned) -> None:
        """Remembers how a model was pruned."""
        self._pruned[model], self._any = pruned, True

    def find(self, model: PreTrainedModel, sparsity_config: Mapping[str, Any] | None) -> Pruned:
        """How a model, or the one that it is a copy of, was pruned.

        Args:
            model (`PreTrainedModel`): as `prune` returned it, or a copy.
            sparsity_config (`Mapping[str, Any]`, *optional*): what its config says now.

        Raises:
            `ValueError`: it was not pruned here, or otherwise since.
            `TypeError`: no model.
        """
        if not self._any:
            raise ValueError("This pruner has pruned nothing yet: call prune(model) first.")
        if not isinstance(model, nn.Module):
            raise TypeError(f"Expected the model that prune(model) returned, got {type(model).__name__}.")
        own = self._pruned.get(model)
        for pruned in reversed(list(self._pruned.values())) if own is None else [own]:
            if pruned.sparsity_config == sparsity_config:
                return pruned
        raise ValueError(
            "The model is not as this pruner has left it, so that its report and model card would be wrong: save what "
            "prune(model) returned; or use model.save_pretrained(directory), which writes the weights alone."
        )
