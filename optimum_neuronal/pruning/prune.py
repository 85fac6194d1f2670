"""One prune: calibration data, the top-up's search, the final pass, the report; at the very end the weights change."""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..blocks.block_inputs import inference
from ..common.machine import Processes, deferred_interrupt
from ..common.notes import get_logger
from ..compat import hf_private
from ..compat.hf_private import execution_device, is_offloaded
from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import CalibrationSet, as_token_ids, draw_windows, resolve_seq_length, take_sequences
from ..files.records import Records
from ..model.projections import Decoder, stored_names
from ..model.sources import locate
from ..report import PruningReport
from ..topup import TopUp
from ..trials import Trials
from .context import PruneContext
from .final_pass import FinalPruning, apply_changes
from .refit import Refit
from .reporting import PruneOutcome, make_report, make_sparsity_config, record_sparsity, versions


logger = get_logger(__name__)


def prune_model(context: PruneContext) -> PruningReport:
    """Prune the model of a context, in place. A failure or an interruption leaves it as it was."""
    model, decoder = context.model, context.decoder
    names = stored_names(model, decoder)
    outcome = find_changes(context)
    report = make_report(context, outcome)
    sparsity_config = make_sparsity_config(decoder, report, names)
    with deferred_interrupt():
        apply_changes(decoder, outcome.changes)  # nothing that may fail from here on
        record_sparsity(model, sparsity_config)
    return report


def find_changes(context: PruneContext) -> PruneOutcome:
    """Find the changes of all weights, and make none."""
    methods, config, runner, topup = context.methods, context.config, context.runner(), _suited_topup(context)
    _warn_if_underdetermined(context)
    trials = Trials(
        runner,
        methods.saliency,
        context.ids,
        config.num_alignment_samples,
        methods.pattern,
        config.min_expert_tokens,
        context.records,
        context.cache,
    )
    refit = Refit.of(config)
    refine = topup.refine if topup.refines else None
    with inference(context.model):
        if methods.needs_calibration:
            trials.cache.get("replay is right", lambda: runner.check_replay(context.ids[:1]))
        allocation = topup.allocate(trials, config.sparsity)
        context.clock.lap("allocation")
        trials = replace(trials, norms=allocation.norms)
        changes, starved = FinalPruning(trials, allocation.plan, refine, topup.statistic, refit).find()
        context.clock.lap("pruning")
    return PruneOutcome(allocation, changes, runner.block_forwards, starved)


def _suited_topup(context: PruneContext) -> TopUp:
    """Return the top-up as it suits the model. Warn of hyper-parameters that change for it."""
    topup = context.methods.topup
    suited = topup.suited_to(context.decoder)
    before, after = asdict(topup), asdict(suited)
    if changed := ", ".join(f"{name}={value!r}" for name, value in after.items() if value != before[name]):
        model = type(context.model).__name__
        logger.warning(f"{model} has no causal language-model head, so the top-up {topup.name!r} uses {changed}.")
    return suited


def _warn_if_underdetermined(context: PruneContext) -> None:
    """Warn if there are fewer tokens than inputs: a least-squares fit then has no unique solution."""
    tokens, projections = context.ids.numel(), context.decoder.projections.values()
    widest = max((p.shape[1] for p in projections if p.expert is None), default=0)
    if context.methods.saliency.updates_weights and tokens < widest:
        logger.warning(
            f"There are only {tokens} calibration tokens for projections of up to {widest} inputs, so the fit of weights is "
            "underdetermined. Use more sequences (num_samples)."
        )


def draw_calibration(
    model: PreTrainedModel,
    config: NeuronALConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: Any = None,
    revision: str | None = None,
) -> CalibrationSet | None:
    """Return the calibration sequences of a config, or of another dataset; None if the methods look at weights alone."""
    if not config.methods.needs_calibration:
        return None
    if isinstance(dataset, CalibrationSet):  # drawn before the weights were loaded
        return dataset
    dataset = config.dataset if dataset is None else dataset
    if dataset is None:
        raise ValueError(
            "No calibration data: name a dataset (NeuronALConfig(dataset=...), --dataset), or pass prune(model, dataset=...) "
            "text or token ids."
        )
    options = {"num_samples": config.num_samples, "vocab_size": model.get_input_embeddings().weight.shape[0]}
    ids = as_token_ids(dataset, config.seq_length)
    seq_length = resolve_seq_length(model.config, config.seq_length if ids is None else ids.shape[1])
    if ids is not None:
        return take_sequences(ids, **options)
    tokenizer = tokenizer or own_tokenizer(model, revision)
    return draw_windows(dataset, tokenizer, seq_length=seq_length, seed=config.seed, **options)


def own_tokenizer(model: PreTrainedModel, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the checkpoint that the model's config names."""
    origin = model.config.name_or_path
    wanted = "Calibration text needs a tokenizer: pass NeuronALPruner(config, tokenizer=...)"
    if not origin:
        raise ValueError(f"{wanted}, or save one beside the model.")
    gguf = {"gguf_file": model.gguf_file} if hasattr(model, "gguf_file") else {}
    try:
        return AutoTokenizer.from_pretrained(origin, revision=revision or "main", **gguf)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"{wanted}. None could be loaded from {origin!r}: {error}") from error


def find_tokenizer(model_or_path: str | Path, **options) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a checkpoint, or None if it has none: only text needs one."""
    model_or_path, options = locate(model_or_path, options)
    with suppress(ImportError, OSError, ValueError):
        return AutoTokenizer.from_pretrained(model_or_path, **options)
    return None


def open_records(folder: Path | None, decoder: Decoder, config: NeuronALConfig, ids: torch.Tensor) -> Records:
    """Return the records of a prune. Raise `ValueError` if they were started with other settings, data or model."""
    started = {**config.to_dict(), **identity(decoder.model, decoder, ids), "versions": versions()}
    return Records(folder, started, Processes.current())


def identity(model: PreTrainedModel, decoder: Decoder, ids: torch.Tensor) -> dict[str, str]:
    """Return checksums of model and calibration data, and the device: a prune is resumed only if they are equal.

    Of each matrix, the first and last row are read.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in hf_private.FILE_KEYS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(repr(list(decoder.projections)).encode())
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            weight = hf_private.offload_hook(module).weights_map[own] if is_offloaded(module) else parameter
            if weight.is_meta:
                continue
            digest.update(f"{name}.{own} {tuple(weight.shape)} {weight.dtype}".encode())
            places = [(end,) * (weight.ndim - 1) for end in (0, -1)]
            for row in (weight[place] for place in places):
                digest.update(row.detach().float().cpu().contiguous().numpy().tobytes())
    return {
        "model": digest.hexdigest(),
        "calibration data": hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest(),
        "device": execution_device(next(iter(decoder.projections.values())).module).type,
    }
