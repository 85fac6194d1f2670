"""The context of one prune: what is checked before any long work, where it is recorded, who may work on the model."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.sparsity_config import read_sparsity_config
from ..config import NeuronALConfig
from ..data.calibration import resolve_seq_length
from ..data.documents import check_dataset
from ..files.journal import RECORDS, Journal
from ..files.work_directory import WorkDirectory
from ..methods import Methods
from ..model.check_model import check_model, check_pattern, check_weights
from ..model.find_blocks import find_decoder
from ..model.identity import identity, versions
from ..model.load_model import load_skeleton
from ..model.projections import Decoder
from ..system.processes import Processes
from .bit_budget import check_choice, pairs_within
from .quantising import check_dtypes, check_head_structure, check_head_weights


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
    if config.embedding_bits is not None:
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
    if config.value_bits is not None or config.bits_per_weight is not None:
        check_dtypes(decoder.projections.values())
    if len(pairs_within(decoder, config)) > 1:
        check_choice(decoder)
    if config.embedding_bits is not None:
        check_head_structure(model)
    resolve_seq_length(model.config, config.seq_length)
    return decoder


FORMAT = 3  # of the records. 1: packed masks marked what falls; 2: they mark what is kept; 3: checksums.
MEMORY_KNOBS = ("batch_size", "max_hidden_bytes", "format")  # fields of the config that do not change the masks


def work_directory(directory: str | Path | None) -> WorkDirectory:
    """The directory of an unfinished prune, see [`WorkDirectory`]. Of several processes, the first one records."""
    return WorkDirectory(directory if Processes.current().rank == 0 else None)


def open_journal(
    folder: WorkDirectory, model: PreTrainedModel, decoder: Decoder, config: NeuronALConfig, ids: torch.Tensor
) -> Journal:
    """What a prune has recorded, if it was begun as this one is.

    Args:
        folder ([`WorkDirectory`]): entered.
        model (`PreTrainedModel`), decoder ([`Decoder`]): dense.
        config ([`NeuronALConfig`]): how to prune.
        ids (`Tensor` of int64, shape (num_samples, seq_length)): calibration sequences; empty if none are needed.

    Raises:
        `ValueError`, `OSError`: see [`Journal`].
    """
    fields = {key: value for key, value in config.to_dict().items() if key not in MEMORY_KNOBS}
    return folder.journal({RECORDS: FORMAT, **fields, **identity(model, decoder, ids), "versions": versions()})


_in_use: set[nn.Parameter] = set()
_lock = threading.Lock()


@contextmanager
def alone_with(model: nn.Module) -> Iterator[None]:
    """While the context lasts, no other thread may enter it with this model, or with one that shares weights with it.

    Raises:
        `RuntimeError`: another thread has.
    """
    own = set(model.parameters()) if isinstance(model, nn.Module) else set()
    with _lock:
        if not own.isdisjoint(_in_use):
            raise RuntimeError("Another thread is pruning this model: wait until it has finished, or prune a copy.")
        _in_use.update(own)
    try:
        yield
    finally:
        with _lock:
            _in_use.difference_update(own)
