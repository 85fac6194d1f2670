"""What can be known to be wrong with a model and a config before any long work."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..checkpoint.sparsity_config import read_sparsity_config
from ..config import NeuronALConfig
from ..data.calibration import resolve_seq_length
from ..data.documents import check_dataset
from ..methods import Methods
from ..model.checking import check_model, check_pattern, check_weights
from ..model.finding import find_decoder
from ..model.loading import load_skeleton
from ..model.projections import Decoder
from .bit_budget import pairs_within
from .choosing_bits import check_choice
from .head_rounding import check_head_structure, check_head_weights
from .rounding import check_dtypes


def check(model: PreTrainedModel, config: NeuronALConfig, methods: Methods) -> Decoder:
    """Finds the decoder, and everything that can be known to be wrong before calibration data is loaded.

    Args:
        model (`PreTrainedModel`): a dense decoder model with its weights.
        config ([`NeuronALConfig`]): how to prune.
        methods ([`Methods`]): of the config.

    Raises:
        `ValueError`, `TypeError`: this model cannot be pruned so; the message says what to do.
    """
    decoder = check_structure(model, config, methods)
    check_weights(decoder.projections)
    if config.head_bits is not None:
        check_head_weights(model)
    return decoder


def check_unloaded(
    model_or_path: str | Path,
    config: NeuronALConfig,
    methods: Methods,
    dtype: str | torch.dtype = "auto",
    **options,
) -> Decoder:
    """[`check_structure`] of a checkpoint, of which only the config is read.

    Args:
        model_or_path (`str` or `Path`), dtype (`str` or `torch.dtype`), options: as for [`load_skeleton`].
        config ([`NeuronALConfig`]), methods ([`Methods`]): as for [`check_structure`].

    Returns:
        [`Decoder`]: of a model without weights.

    Raises:
        `ValueError`, `TypeError`: it cannot be pruned so.
        `OSError`: there is no such model.
    """
    model = load_skeleton(model_or_path, dtype, **options)
    if read_sparsity_config(model.config) is not None:
        raise ValueError(
            f"{model_or_path} is sparse already (its config.json has a sparsity_config): name the dense model that it was "
            "made from."
        )
    return check_structure(model, config, methods)


def check_texts(config: NeuronALConfig, evaluate: Iterable[str] = ()) -> None:
    """Raises what is wrong with the names and files of calibration and test text; downloads nothing.

    Args:
        config ([`NeuronALConfig`]): of a prune.
        evaluate (`Iterable[str]`): test texts, as for [`evaluate_perplexity`].

    Raises:
        `RuntimeError`, `OSError`, `ValueError`: as [`check_dataset`].
    """
    if config.dataset is not None and config.make_methods().needs_calibration:
        check_dataset(config.dataset)
    for dataset in evaluate:
        check_dataset(dataset, "test")


def check_structure(model: PreTrainedModel, config: NeuronALConfig, methods: Methods) -> Decoder:
    """Finds the decoder, and what can be known to be wrong before the weights are loaded.

    Args:
        model (`PreTrainedModel`): a decoder model; its weights may still be on the meta device.
        config ([`NeuronALConfig`]): how to prune.
        methods ([`Methods`]): of the config.

    Raises:
        `ValueError`, `TypeError`: this model cannot be pruned so; the message says what to do.
    """
    check_model(model)
    if read_sparsity_config(model.config) is not None:
        raise ValueError(
            "The model is sparse already (model.config.sparsity_config). Load the dense model; or, to prune further in "
            "Python, del model.config.sparsity_config first."
        )
    decoder = find_decoder(model, config.targets, config.ignore)
    methods.suited_to(decoder)
    check_pattern(decoder.projections, methods.pattern)
    if config.value_bits is not None or config.bits is not None:
        check_dtypes(decoder.projections.values())
    if len(pairs_within(decoder, config)) > 1:
        check_choice(decoder)
    if config.head_bits is not None:
        check_head_structure(model)
    resolve_seq_length(model.config, config.seq_length)
    return decoder
