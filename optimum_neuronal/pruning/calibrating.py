"""The calibration sequences of a prune: whether any are needed, what they are drawn from, and by which tokenizer."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..config import NeuronALConfig
from ..data.calibration import CalibrationSet, as_token_ids, draw_windows, resolve_seq_length, take_sequences
from ..methods import Methods
from ..report import PruningReport


def draw_calibration(
    model: PreTrainedModel,
    config: NeuronALConfig,
    methods: Methods,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset=None,
    revision: str | None = None,
) -> tuple[CalibrationSet | None, PreTrainedTokenizerBase | None]:
    """The calibration sequences that a config asks for, or those of another dataset.

    Args:
        model (`PreTrainedModel`): whose vocabulary and longest sequence count; its weights need not be loaded.
        config ([`NeuronALConfig`]): how many sequences, of how many tokens, from which dataset.
        methods ([`Methods`]): of the config.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for text. None: the one of the model's own checkpoint.
        dataset (*optional*): instead of the config's: text of any kind that [`load_documents`] takes, or token ids.
        revision (`str`, *optional*): of the model on the Hub, if its tokenizer is to be loaded.

    Returns:
        `tuple`: the sequences, None if saliency and top-up look at weights alone; and the tokenizer, which is the one
        given unless it was None and had to be loaded.

    Raises:
        `ValueError`: no dataset, no tokenizer for text, or sequences that the model does not admit; and what
            [`draw_windows`] and [`take_sequences`] raise.
    """
    if not methods.needs_calibration:
        return None, tokenizer
    dataset = config.dataset if dataset is None else dataset
    if dataset is None:
        raise ValueError(
            "No calibration data: name a dataset (NeuronALConfig(dataset=...), --dataset), or pass prune(model, dataset=...) "
            "text or token ids."
        )
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = as_token_ids(dataset, config.seq_length)
    if ids is not None:
        calibration = take_sequences(ids, config.num_samples, vocab_size)
        resolve_seq_length(model.config, ids.shape[1])
        return calibration, tokenizer
    tokenizer = tokenizer or own_tokenizer(model, revision)
    calibration = draw_windows(
        dataset,
        tokenizer,
        num_samples=config.num_samples,
        seq_length=resolve_seq_length(model.config, config.seq_length),
        seed=config.seed,
        vocab_size=vocab_size,
    )
    return calibration, tokenizer


def own_tokenizer(model: PreTrainedModel, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model's own checkpoint.

    Args:
        model (`PreTrainedModel`): its config names the checkpoint that it was loaded from.
        revision (`str`, *optional*): branch, tag or commit on the Hub. None: main.

    Raises:
        `ValueError`: there is none.
    """
    origin = model.config.name_or_path
    message = (
        "Calibration text needs a tokenizer: pass NeuronALPruner(config, tokenizer=...), or save one beside the model."
    )
    if not origin:
        raise ValueError(message)
    try:
        return AutoTokenizer.from_pretrained(origin, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise ValueError(f"{message} None could be loaded from {origin!r}: {error}") from error


def find_tokenizer(model_or_path: str | Path, **options) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint, None if it has none: text alone needs one.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory.
        options: for `AutoTokenizer.from_pretrained`: `revision`, `token`, `trust_remote_code`.
    """
    with suppress(OSError, ValueError):
        return AutoTokenizer.from_pretrained(model_or_path, **options)
    return None


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
