"""The context of one prune, which the check makes and every step receives, and what resuming it depends on."""

import hashlib
import json
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from .. import __version__
from ..common.clock import Clock
from ..common.processes import Processes
from ..compat import hf_private
from ..compat.accelerate import execution_device
from ..config.methods import Methods
from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import CalibrationSet
from ..files.records import Records, WorkDirectory
from ..model.projections import Decoder
from ..packed.change import Change
from ..topup import Allocation
from ..trials.cache import Cache


_in_use: set[nn.Parameter] = set()
_lock = threading.Lock()

TOKENS_PER_FORWARD = 2048  # enough to keep a processor busy, and no more memory than one of the paper's sequences


@dataclass(frozen=True, eq=False)
class PruneContext:
    """One prune: the dense model, how it is pruned, and what its steps share.

    Args:
        decoder ([`Decoder`]): of the dense model.
        config ([`NeuronALConfig`]): how to prune.
        methods ([`Methods`]): of the config.
        calibration ([`CalibrationSet`], *optional*): None if saliency and top-up look at weights alone.
        clock ([`Clock`]): times the phases.
        records ([`Records`]): of finished steps and blocks.
        cache ([`Cache`], *optional*): shared by prunes of the same model with the same calibration sequences and rotation.
        batch_size, max_hidden_bytes (`int`, *optional*): as for [`NeuronALPruner.prune`].
    """

    decoder: Decoder
    config: NeuronALConfig
    methods: Methods
    calibration: CalibrationSet | None = None
    clock: Clock = field(default_factory=Clock)
    records: Records = field(default_factory=lambda: Records(processes=Processes.current()))
    cache: Cache | None = None
    batch_size: int | None = None
    max_hidden_bytes: int | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The whole model."""
        return self.decoder.model

    @property
    def ids(self) -> torch.Tensor:
        """Calibration sequences, int64, shape (num_samples, seq_length); of shape (0, 0) without calibration."""
        return torch.empty(0, 0, dtype=torch.int64) if self.calibration is None else self.calibration.ids


@dataclass(frozen=True)
class PruneOutcome:
    """The result of a prune.

    Args:
        allocation ([`Allocation`]): what the top-up decided.
        changes (`dict[str, Change]`): projection name -> what becomes of its weight.
        block_forwards (`int`): how often a block was run on one sequence.
        starved_experts (`list[str]`): the experts' projections that fell back.
    """

    allocation: Allocation
    changes: dict[str, Change]
    block_forwards: int
    starved_experts: list[str]


def default_batch_size(tokens: int) -> int:
    """Return how many sequences of so many tokens go through a forward if the user gave no number: at least 1."""
    return max(1, TOKENS_PER_FORWARD // max(1, tokens))


def open_records(folder: WorkDirectory, decoder: Decoder, config: NeuronALConfig, ids: torch.Tensor) -> Records:
    """Return the records of a prune, which has to match the model, config and calibration sequences it was started with.

    Args:
        folder ([`WorkDirectory`]): from [`work_directory`].
        decoder ([`Decoder`]): of the dense model.
        config ([`NeuronALConfig`]): how to prune, as the user gave it.
        ids (`Tensor` of int64, shape (num_samples, seq_length)): calibration sequences; empty if none are needed.

    Raises:
        `ValueError`, `OSError`: see [`Records`].
    """
    begun = {**config.to_dict(), **identity(decoder.model, decoder, ids), "versions": versions()}
    return Records(folder.path, begun, Processes.current())


def identity(model: PreTrainedModel, decoder: Decoder, ids: torch.Tensor) -> dict[str, str]:
    """Return checksums of a model and of its calibration data: an unfinished prune is resumed only if they are equal.

    Args:
        model (`PreTrainedModel`): dense.
        decoder ([`Decoder`]): its blocks and projections.
        ids (`Tensor` of int64, shape (sequences, tokens)): all calibration sequences.

    Returns:
        `dict[str, str]`: `model`: of its config, of names, shapes and dtypes, and of the first and the last row of
            every projection that is pruned; `calibration data`: of all token ids; `device`: the kind that computes.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in hf_private.OF_THE_FILE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, projection in decoder.projections.items():
        weight = projection.stored_weight
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        for row in (weight[0], weight[-1]):
            digest.update(row.detach().float().cpu().contiguous().numpy().tobytes())
    return {
        "model": digest.hexdigest(),
        "calibration data": hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest(),
        "device": execution_device(next(iter(decoder.projections.values())).module).type,
    }


def versions() -> dict[str, str]:
    """Return package -> version: of this package and of the libraries that decide its results."""
    return {
        "optimum_neuronal": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@contextmanager
def exclusive(model: nn.Module) -> Iterator[None]:
    """Keep other threads from pruning this model, or one that shares weights with it: they would see trial weights.

    Raises:
        `RuntimeError`: another thread has entered.
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
