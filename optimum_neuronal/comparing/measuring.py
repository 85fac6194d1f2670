"""Measuring combinations of methods on one model, whose weights are put back after each."""

import hashlib
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..compat.accelerate import is_offloaded
from ..data.calibration import CalibrationSet, as_token_ids
from ..evaluation.perplexity import evaluate_perplexity, load_windows
from ..evaluation.tasks import evaluate_tasks
from ..model.packed_size import packed_size
from ..model.projections import Decoder, trial_weights
from ..pruning.calibrating import draw_calibration, own_tokenizer
from ..pruning.context import PruneContext, check, identity, versions
from ..pruning.prune import default_batch_size, find_changes
from ..pruning.reporting import make_report
from ..sparsity.plan import row_sparsity
from ..system.machine import reset_peak_memory
from ..trials.engine import Cache
from .results import DENSE, Result
from .settings import Combination, ComparisonSettings


BINS = 64  # of the rows of a weight in a heat map
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError, OSError)


class Measurements:
    """Measurements of the dense model and of each combination, with everything that combinations share.

    Args:
        model (`PreTrainedModel`): dense, its weights in memory.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the tokenizer of the model's own checkpoint.
        settings ([`ComparisonSettings`]): combinations, data and tests.

    Raises:
        `ValueError`: the model cannot be pruned, or calibration data or tests do not fit it.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: ComparisonSettings
    ):
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        configs = list(settings.possible.values())
        self.decoder: Decoder = check(model, configs[0]).decoder
        if any(is_offloaded(projection.module) for projection in self.decoder.projections.values()):
            raise ValueError("compare tries weights in memory: load the model without offloading.")
        self.calibration: CalibrationSet | None = None
        calibrated = next((config for config in configs if config.make_methods().needs_calibration), None)
        if calibrated is not None:
            self.calibration = draw_calibration(model, calibrated, tokenizer, settings.dataset)
            self.tokenizer = tokenizer or (self.calibration and self.calibration.tokenizer)
        if settings.tasks or any(as_token_ids(test) is None for test in settings.tests.values()):
            self.tokenizer = self.tokenizer or own_tokenizer(model)
        self.windows = {
            name: load_windows(model.config, self.tokenizer, test, configs[0].seq_length, settings.max_windows)
            for name, test in settings.tests.items()
        }
        self.task_options = {"limit": settings.limit, "include_path": settings.include_path}
        self.cache = Cache(lasting=True)

    def identity(self) -> dict[str, Any]:
        """Return everything that a result depends on, except its config."""
        ids = torch.empty(0, 0, dtype=torch.int64) if self.calibration is None else self.calibration.ids
        tests = {
            name: hashlib.sha256(windows.contiguous().numpy().tobytes()).hexdigest()
            for name, windows in self.windows.items()
        }
        own = {"tests": tests, "tasks": self.settings.tasks, **self.task_options, "versions": versions()}
        return {**identity(self.model, self.decoder, ids), **own}

    def dense(self) -> Result:
        """Return the figures of the dense model."""
        size = packed_size(self.decoder, lambda projection: 0)
        return Result(0.0, DENSE, DENSE, **self._figures(), bits_per_weight=size.bits_per_weight)

    def run(self, combination: Combination) -> Result:
        """Return the figures of one combination, from search to test; the model's weights are put back."""
        config = self.settings.configs[combination]
        result = Result(**combination._asdict())
        if isinstance(config, str):
            result.error = config
            return result
        reset_peak_memory()
        try:
            context = replace(
                PruneContext.of(self.decoder, config),
                calibration=self.calibration,
                cache=self.cache,
                batch_size=self.settings.batch_size,
                max_hidden_bytes=self.settings.max_hidden_bytes,
            )
            outcome = find_changes(context)
            report = make_report(context, outcome)
            with trial_weights(list(self.decoder.projections.values()), lambda p: outcome.changes[p.name]):
                rows = self._row_sparsity() if context.methods.topup.by_row else {}
                figures = self._figures()
        except EXPECTED as error:
            result.error = " ".join(f"{error}".split()) or type(error).__name__
            return result
        return Result(
            **combination._asdict(),
            **figures,
            bits_per_weight=report.bits_per_weight,
            achieved_sparsity=report.achieved_sparsity,
            block_sparsity=list(report.blocks.values()),
            row_sparsity=rows,
            allocation_seconds=report.seconds["allocation"],
            pruning_seconds=report.seconds["pruning"],
            peak_memory=report.peak_memory,
            block_lambda=report.block_lambda,
            row_lambda=report.row_lambda,
            decisions=report.decisions,
            config=report.config,
        )

    def _row_sparsity(self) -> dict[str, list[float]]:
        """Return projection name -> mean sparsity of `BINS` stretches of its rows; small projections are left out."""
        return {
            name: [round(part.mean().item(), 4) for part in row_sparsity(projection.weight).tensor_split(BINS)]
            for name, projection in self.decoder.projections.items()
            if projection.shape[0] >= BINS
        }

    def _figures(self) -> dict[str, Any]:
        """Return perplexity and accuracy of the model with its present weights."""
        perplexity = {
            name: evaluate_perplexity(self.model, None, ids, batch_size=default_batch_size(ids.shape[1]))
            for name, ids in self.windows.items()
        }
        accuracy = {}
        if self.settings.tasks:
            results = evaluate_tasks(self.model, self.tokenizer, self.settings.tasks, **self.task_options)
            accuracy = {name: asdict(result) for name, result in results.items()}
        return {"perplexity": perplexity, "accuracy": accuracy}
