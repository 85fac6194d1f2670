"""Trying combinations of methods out on one model, whose weights are put back after each."""

import hashlib
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint.packed_size import packed_size
from ..compat.accelerate import is_offloaded
from ..data.calibration import CalibrationSet, as_token_ids
from ..evaluation.perplexity import evaluate_perplexity, load_windows
from ..evaluation.tasks import evaluate_tasks
from ..methods import Methods
from ..model.identity import identity, versions
from ..model.projections import Decoder
from ..model.trial import trial_weights
from ..pruning.calibrating import draw_calibration, own_tokenizer
from ..pruning.context import PruneContext, check
from ..pruning.prune import default_batch_size, find_changes
from ..pruning.reporting import make_report
from ..sparsity.plan import row_sparsity
from ..system.memory import reset_peak_memory
from ..trials.records import Kept
from .asked import Asked, Combination
from .results import DENSE, Result


BINS = 64  # enough for a picture
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError, OSError)


class Trials:
    """The dense model, what all combinations share, and the tests.

    Args:
        model (`PreTrainedModel`): dense, its weights in memory.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the one of the model's own checkpoint, if it is needed.
        asked ([`Asked`]): which combinations, and what is measured of each.

    Raises:
        `ValueError`: the model cannot be pruned, or calibration data or tests do not fit it.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, asked: Asked):
        self.model, self.tokenizer, self.asked = model, tokenizer, asked
        configs = asked.possible
        self.methods: dict[Combination, Methods] = {key: config.make_methods() for key, config in configs.items()}
        first = next(iter(configs))
        self.decoder: Decoder = check(model, configs[first]).decoder
        if any(is_offloaded(projection.module) for projection in self.decoder.projections.values()):
            raise ValueError("compare tries weights out in memory: load the model without offloading.")
        self.calibration: CalibrationSet | None = None
        calibrated = next((key for key, methods in self.methods.items() if methods.needs_calibration), None)
        if calibrated is not None:
            self.calibration = draw_calibration(model, configs[calibrated], tokenizer, asked.dataset)
            self.tokenizer = tokenizer or (self.calibration and self.calibration.tokenizer)
        if asked.tasks or any(as_token_ids(test) is None for test in asked.tests.values()):
            self.tokenizer = self.tokenizer or own_tokenizer(model)
        self.windows = {
            name: load_windows(model.config, self.tokenizer, test, configs[first].seq_length, asked.max_windows)
            for name, test in asked.tests.items()
        }
        self.kept = Kept(lasting=True)

    @property
    def identity(self) -> dict[str, Any]:
        """What every result depends on, beside its config."""
        ids = torch.empty(0, 0, dtype=torch.int64) if self.calibration is None else self.calibration.ids
        tests = {
            name: hashlib.sha256(windows.contiguous().numpy().tobytes()).hexdigest()
            for name, windows in self.windows.items()
        }
        own = {"tests": tests, "tasks": self.asked.tasks, **self._task_options, "versions": versions()}
        return {**identity(self.model, self.decoder, ids), **own}

    @property
    def _task_options(self) -> dict[str, Any]:
        return {"limit": self.asked.limit, "include_path": self.asked.include_path}

    def dense(self) -> Result:
        """The dense model's figures."""
        size = packed_size(self.decoder, lambda projection: 0)
        return Result(0.0, DENSE, DENSE, **self._measured(), bits_per_weight=size.bits_per_weight)

    def run(self, combination: Combination) -> Result:
        """One combination, from search to test; the model's weights are put back."""
        config, methods = self.asked.configs[combination], self.methods.get(combination)
        result = Result(**combination._asdict())
        if isinstance(config, str):
            result.error = config
            return result
        reset_peak_memory()
        try:
            context = replace(PruneContext.of(self.decoder, config), calibration=self.calibration, kept=self.kept)
            outcome = find_changes(context)
            changed = list(self.decoder.projections.values())
            report = make_report(context, outcome)
            with trial_weights(changed, lambda p: outcome.changes[p.name]):
                rows = self._row_sparsity() if methods.topup.by_row else {}
                measured = self._measured()
        except EXPECTED as error:
            result.error = " ".join(f"{error}".split()) or type(error).__name__
            return result
        return Result(
            **combination._asdict(),
            **measured,
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
        """Of every projection, means over at most `BINS` stretches of its rows."""
        return {
            name: [round(part.mean().item(), 4) for part in row_sparsity(projection.weight).tensor_split(BINS)]
            for name, projection in self.decoder.projections.items()
            if projection.shape[0] >= BINS
        }

    def _measured(self) -> dict[str, Any]:
        perplexity = {
            name: evaluate_perplexity(self.model, None, ids, batch_size=default_batch_size(ids.shape[1]))
            for name, ids in self.windows.items()
        }
        accuracy = {}
        if self.asked.tasks:
            results = evaluate_tasks(self.model, self.tokenizer, self.asked.tasks, **self._task_options)
            accuracy = {name: asdict(result) for name, result in results.items()}
        return {"perplexity": perplexity, "accuracy": accuracy}
