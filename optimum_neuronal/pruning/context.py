"""The context of one prune: made once by the checks that precede any long work, and passed on to every step."""

import hashlib
import json
import platform
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from .. import __version__
from ..checkpoint.sparsity_config import read_sparsity_config
from ..common.clock import Clock
from ..common.processes import Processes
from ..common.validation import check_count
from ..compat import hf_private
from ..compat.accelerate import execution_device, is_offloaded
from ..config.methods import Methods
from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import CalibrationSet, resolve_seq_length
from ..data.documents import find_dataset
from ..files.records import Records, WorkDirectory
from ..model.find_blocks import find_decoder
from ..model.load_model import load_skeleton
from ..model.projections import Decoder
from ..packed.change import Change
from ..packed.formats.packed_matrix import DTYPES
from ..rotation.rotated_weights import find_rotated
from ..topup import Allocation
from ..trials.cache import Cache
from .check_model import check_changeable, check_model, check_pattern, check_weights
from .rounding_head import check_head_structure, check_head_weights


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

    @classmethod
    def of(cls, decoder: Decoder, config: NeuronALConfig) -> "PruneContext":
        """Return the context of a prune of a decoder."""
        return cls(decoder, config, config.make_methods())

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


def check_memory(batch_size: int | None, max_hidden_bytes: int | None) -> None:
    """Raise `TypeError` or `ValueError` unless these are counts or None."""
    for name, value, least in (("batch_size", batch_size, 1), ("max_hidden_bytes", max_hidden_bytes, 0)):
        if value is not None:
            check_count(name, value, least)


def check(
    model: PreTrainedModel,
    config: NeuronALConfig,
    batch_size: int | None = None,
    max_hidden_bytes: int | None = None,
) -> PruneContext:
    """Raise for everything that can be known to be wrong before calibration data is loaded; return the context.

    Args:
        model (`PreTrainedModel`): a dense decoder model with its weights.
        config ([`NeuronALConfig`]): how to prune.
        batch_size, max_hidden_bytes (`int`, *optional*): as for [`NeuronALPruner.prune`].

    Raises:
        `ValueError`, `TypeError`: this model cannot be pruned as the config says; the message says what to do.
    """
    check_memory(batch_size, max_hidden_bytes)
    context = check_structure(model, config)
    check_weights(context.decoder.projections)
    if config.bits_per_weight is not None:
        _check_in_memory(context.decoder)
    if config.embedding_bits is not None:
        check_head_weights(model)
    if context.methods.rotation is not None:
        for name, parameter in model.named_parameters():
            check_changeable(name, parameter)
    return replace(context, batch_size=batch_size, max_hidden_bytes=max_hidden_bytes)


def check_structure(model: PreTrainedModel, config: NeuronALConfig) -> PruneContext:
    """Raise for what can be known to be wrong before the weights are loaded; return the context.

    Args:
        model (`PreTrainedModel`): a decoder model; its weights may still be on the meta device.
        config ([`NeuronALConfig`]): how to prune.

    Raises:
        `ValueError`, `TypeError`: this model cannot be pruned as the config says; the message says what to do.
    """
    check_model(model)
    if read_sparsity_config(model.config) is not None:
        raise ValueError(
            "The model is sparse already (model.config.sparsity_config). Load the dense model; or, to prune further in "
            "Python, del model.config.sparsity_config first."
        )
    decoder = find_decoder(model, config.targets, config.ignore)
    context = PruneContext.of(decoder, config)
    context.methods.suited_to(decoder)
    check_pattern(decoder.projections, context.methods.pattern)
    if config.bits_per_weight is not None:
        _check_dtypes(decoder)
    if config.embedding_bits is not None:
        check_head_structure(model)
    if context.methods.rotation is not None:
        find_rotated(decoder, context.methods.rotation.untie)
    resolve_seq_length(model.config, config.seq_length)
    return context


def _check_dtypes(decoder: Decoder) -> None:
    """Raise `ValueError` if the weights of a projection cannot be quantised."""
    for name, projection in decoder.projections.items():
        if projection.owner.dtype not in DTYPES:
            raise ValueError(
                f"{name} has the dtype {projection.owner.dtype}: with bits_per_weight, expected one of "
                f"{', '.join(map(str, DTYPES))}. Load the model in one of them."
            )


def _check_in_memory(decoder: Decoder) -> None:
    """Raise `ValueError` for offloaded weights, which packed modules cannot take the place of."""
    for name, projection in decoder.projections.items():
        if is_offloaded(projection.module):
            raise ValueError(
                f"bits_per_weight needs the weights in memory, but those of {name} are offloaded: load the model without "
                "device_map, and prune without --stream."
            )


def check_unloaded(
    model_or_path: str | Path, config: NeuronALConfig, dtype: str | torch.dtype = "auto", **options
) -> PruneContext:
    """Raise for what can be known to be wrong from the model's config alone; return the context, without weights.

    Args:
        model_or_path (`str` or `Path`), dtype (`str` or `torch.dtype`), options: as for [`load_skeleton`].
        config ([`NeuronALConfig`]): how to prune.

    Raises:
        `ValueError`, `TypeError`: the model cannot be pruned as the config says.
        `OSError`: there is no such model.
    """
    model = load_skeleton(model_or_path, dtype, **options)
    if read_sparsity_config(model.config) is not None:
        raise ValueError(
            f"{model_or_path} is sparse already (its config.json has a sparsity_config): name the dense model that it was "
            "made from."
        )
    return check_structure(model, config)


def check_texts(config: NeuronALConfig, evaluate: Iterable[str] = ()) -> None:
    """Raise for what is wrong with the names and files of calibration and test text; download nothing.

    Args:
        config ([`NeuronALConfig`]): of a prune.
        evaluate (`Iterable[str]`): test texts, as for [`evaluate_perplexity`].

    Raises:
        `RuntimeError`, `OSError`, `ValueError`: as [`find_dataset`].
    """
    if config.dataset is not None and config.make_methods().needs_calibration:
        find_dataset(config.dataset)
    for dataset in evaluate:
        find_dataset(dataset)


def open_records(folder: WorkDirectory, decoder: Decoder, config: NeuronALConfig, ids: torch.Tensor) -> Records:
    """Return the records of a prune that was begun with the same model, config and calibration sequences.

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
def alone_with(model: nn.Module) -> Iterator[None]:
    """Keep other threads from entering with this model, or with one that shares weights with it, while the context lasts.

    Their blocks would compute with this thread's trial weights.

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
