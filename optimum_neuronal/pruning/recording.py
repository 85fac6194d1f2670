"""Where an unfinished prune is recorded, and what its records depend on."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..config import NeuronALConfig
from ..files.journal import RECORDS, Journal
from ..files.work_directory import WorkDirectory
from ..model.identity import identity
from ..model.projections import Decoder
from ..system.processes import Processes
from .reporting import versions


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
