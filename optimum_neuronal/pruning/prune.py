"""From a config to what becomes of every weight: checks, calibration data, search, final pruning, report.

Nothing here changes a weight, so the same model can be asked again: by [`NeuronALPruner`], which applies what was found,
and by [`compare`], which tries it out.
"""

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint.sparsity_config import read_sparsity_config
from ..config import NeuronALConfig
from ..data.calibration import CalibrationSet, as_token_ids, draw_sequences, resolve_seq_length
from ..decoder.finding import check_model, check_pattern, check_weights, find_decoder
from ..decoder.placement import execution_device
from ..decoder.projections import Decoder
from ..engine.capture import inference
from ..engine.sweep import Sweep
from ..report import PruningReport
from ..runtime.journal import Journal
from ..runtime.memory import with_less_memory
from ..runtime.peak_memory import peak_memory
from ..runtime.processes import Processes
from ..runtime.version import __version__
from ..sparsity.changes import Change
from ..topup import Allocation
from .final_pruning import FinalPruning
from .sparsity_found import measure_sparsity


TOKENS_PER_FORWARD = 2048  # enough to keep a processor busy, and no more memory than one of the paper's sequences


class Clock:
    """Seconds by phase."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Ends a phase, and begins the next one."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


@dataclass(frozen=True)
class Found:
    """What a prune found.

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


@dataclass
class Shared:
    """What prunes of the same model with the same calibration sequences have in common, so that it is done once.

    Args:
        kept (`dict`): see [`Engine`]: inputs of the blocks, activations and scores of the dense model.
        checked (`bool`): whether replaying the blocks was seen to be right.
    """

    kept: dict[Any, Any] = field(default_factory=dict)
    checked: bool = False


def check(model: PreTrainedModel, config: NeuronALConfig) -> Decoder:
    """Everything that can be known to be wrong before calibration data is loaded: raises `ValueError`, `TypeError`."""
    decoder = check_structure(model, config)
    check_weights(decoder.projections)
    return decoder


def check_structure(model: PreTrainedModel, config: NeuronALConfig) -> Decoder:
    """What of [`check`] can be known before the weights are loaded."""
    check_model(model)
    if read_sparsity_config(model.config) is not None:
        raise ValueError(
            "The model is sparse already (model.config.sparsity_config). Load the dense model; or, to prune further, "
            "del model.config.sparsity_config first."
        )
    decoder = find_decoder(model, config.targets, config.ignore)
    config.make_topup().check(decoder)
    check_pattern(decoder.projections, config.make_pattern())
    resolve_seq_length(model.config, config.seq_length)
    return decoder


def needs_calibration(config: NeuronALConfig) -> bool:
    """Whether saliency or top-up look at activations."""
    topup = config.make_topup()
    return config.make_saliency().uses_activations or topup.uses_calibration or topup.refines


def draw(
    model: PreTrainedModel, config: NeuronALConfig, tokenizer: PreTrainedTokenizerBase | None, dataset=None
) -> CalibrationSet:
    """The calibration sequences that a config asks for, or those of another dataset.

    Raises:
        `ValueError`: no dataset, no tokenizer for text, or sequences that the model does not admit.
    """
    dataset = config.dataset if dataset is None else dataset
    if dataset is None:
        raise ValueError(
            "No calibration data: set NeuronALConfig(dataset=...), or pass prune(model, dataset=...) text or token ids."
        )
    seq_length = config.seq_length
    if as_token_ids(dataset) is None:
        seq_length = resolve_seq_length(model.config, seq_length)
        tokenizer = tokenizer or own_tokenizer(model)
    calibration = draw_sequences(
        dataset,
        tokenizer,
        num_samples=config.num_samples,
        seq_length=seq_length,
        seed=config.seed,
        vocab_size=model.get_input_embeddings().weight.shape[0],
    )
    resolve_seq_length(model.config, calibration.ids.shape[1])
    return calibration


def own_tokenizer(model: PreTrainedModel, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model's own checkpoint. Raises `ValueError` if there is none."""
    origin = model.config.name_or_path
    message = "Calibration text needs a tokenizer: pass NeuronALPruner(config, tokenizer=...)."
    if not origin:
        raise ValueError(message)
    try:
        return AutoTokenizer.from_pretrained(origin, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise ValueError(f"{message} None could be loaded from {origin!r}: {error}") from error


def find_changes(
    model: PreTrainedModel,
    decoder: Decoder,
    config: NeuronALConfig,
    ids: torch.Tensor,
    clock: Clock,
    journal: Journal | None = None,
    shared: Shared | None = None,
) -> Found:
    """What becomes of every weight; none is changed.

    Args:
        model (`PreTrainedModel`), decoder ([`Decoder`]): from [`check`].
        config ([`NeuronALConfig`]): how to prune.
        ids (`Tensor` of int64, shape (num_samples, seq_length)): calibration sequences; empty if none are needed.
        clock ([`Clock`]): is told when allocation and pruning end.
        journal ([`Journal`], *optional*): where finished steps and blocks are recorded, and looked up.
        shared ([`Shared`], *optional*): what earlier prunes have found already.

    Raises:
        `MemoryError`: too little memory, even with half the batch.
    """
    topup = config.make_topup()
    check_first = needs_calibration(config) and not (shared and shared.checked)

    def find(batch_size: int) -> Found:
        sweep = _sweep(model, decoder, config, ids, batch_size, journal, shared)
        if check_first:
            sweep.check_replay()
        allocation = topup.allocate(sweep, config.sparsity)
        clock.lap("allocation")
        refine = topup.refine if topup.refines else None
        pruning = FinalPruning(sweep, allocation.plan, refine, topup.statistic)
        changes = pruning.find()
        clock.lap("pruning")
        return Found(allocation, changes, sweep.block_forwards, pruning.starved_experts)

    with inference(model):
        batch_size = config.batch_size or max(1, TOKENS_PER_FORWARD // max(1, ids.shape[1]))
        found = with_less_memory(find, batch_size)
    if shared is not None:
        shared.checked |= check_first
    return found


def _sweep(
    model: PreTrainedModel,
    decoder: Decoder,
    config: NeuronALConfig,
    ids: torch.Tensor,
    batch_size: int,
    journal: Journal | None,
    shared: Shared | None,
) -> Sweep:
    return Sweep(
        decoder,
        config.make_saliency(),
        ids,
        config.num_alignment_samples,
        batch_size,
        execution_device(model.get_input_embeddings()),
        config.min_expert_tokens,
        config.max_hidden_bytes,
        config.make_pattern(),
        journal,
        Processes.current(),
        shared.kept if shared is not None else None,
    )


def make_report(
    decoder: Decoder,
    config: NeuronALConfig,
    calibration: CalibrationSet | None,
    found: Found,
    seconds: Mapping[str, float],
) -> PruningReport:
    """What was done, told from the weights as they are now, sparse."""
    achieved, blocks, projections = measure_sparsity(decoder)
    values = config.to_dict()
    if config.dataset is not None:
        values["dataset"] = without_folders(config.dataset)
    decisions = found.allocation.decisions
    return PruningReport(
        config=values,
        requested_sparsity=config.sparsity,
        achieved_sparsity=achieved,
        blocks=blocks,
        projections=projections,
        block_lambda=decisions.get("block", {}).get("lambda"),
        row_lambda=decisions.get("row", {}).get("lambda"),
        decisions=decisions,
        calibration={} if calibration is None else calibration.to_dict(),
        seconds=dict(seconds),
        block_forwards=found.block_forwards,
        starved_experts=found.starved_experts,
        peak_memory=peak_memory(),
        versions=versions(),
    )


def without_folders(dataset: str) -> str:
    """The name of a dataset for a report, which is published: no folders of this machine."""
    is_file = Path(dataset).is_file() or Path(dataset.rpartition(":")[0]).is_file()  # FILE or FILE:COLUMN
    return Path(dataset).name if is_file else dataset


def versions() -> dict[str, str]:
    """Of this package and of what decides its results."""
    return {
        "optimum_neuronal": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
