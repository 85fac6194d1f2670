"""Trying combinations of methods out on one model, whose weights are put back after each."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import NeuronALConfig
from ..config_fields import ALIASES
from ..data.calibration import CalibrationSet, as_token_ids
from ..decoder.identity import identity
from ..decoder.placement import is_offloaded
from ..decoder.projections import Decoder
from ..decoder.trial import trial_weights
from ..methods import Methods
from ..pruning.calibrating import draw_calibration, own_tokenizer
from ..pruning.checking import check
from ..pruning.finding import TOKENS_PER_FORWARD, Shared, find_changes
from ..pruning.reporting import make_report, versions
from ..runtime.clock import Clock
from ..runtime.peak_memory import reset_peak_memory
from ..runtime.registry import parse_method
from ..saliency import SALIENCIES
from ..sparsity.plan import row_sparsity
from ..topup import TOPUPS
from .perplexity import evaluate_perplexity, load_windows
from .results import DENSE, Result
from .tasks import check_tasks, evaluate_tasks
from .test_sets import name_test_sets


BINS = 64  # enough for a picture
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError, OSError)


def make_config(sparsity: float, saliency: str, topup: str, dataset, others: dict[str, Any]) -> NeuronALConfig:
    """The config of one combination. With a saliency that knows no rows, a top-up leaves them alone if it can.

    Args:
        sparsity (`float`): in [0, 1).
        saliency, topup (`str`): names of methods, with hyper-parameters if wanted: `"owl:half_width=0.1"`.
        dataset: calibration data; the config holds a name or a path only.
        others (`dict[str, Any]`):
            Fields of the config, for all combinations. Among them aliases, which only the top-ups that they belong to
            are given, and which its own hyper-parameters override.

    Raises:
        `ValueError`, `TypeError`: this combination is not possible.
    """
    saliency, saliency_args = parse_method(saliency)
    topup, topup_args = parse_method(topup)
    fields = {name: value for name, value in others.items() if name not in ALIASES}
    aliases = {name: value for name, value in others.items() if name in ALIASES and topup in ALIASES[name].topups}
    without_rows = {} if SALIENCIES.get(saliency).knows_rows else TOPUPS.get(topup).without_rows
    return NeuronALConfig(
        sparsity=sparsity,
        saliency=saliency,
        saliency_args=saliency_args,
        topup=topup,
        topup_args={**without_rows, **aliases, **topup_args},
        dataset=dataset if isinstance(dataset, str) else None,
        **fields,
    )


def make_configs(asked: Sequence[tuple], dataset, others: dict[str, Any]) -> dict[tuple, NeuronALConfig | str]:
    """Combination -> its config, or why there is none. Arguments: [`Trials`]. Raises `ValueError` if there is none at all."""
    configs: dict[tuple, NeuronALConfig | str] = {}
    for combination in asked:
        try:
            configs[combination] = make_config(*combination, dataset, others)
        except ValueError as error:
            configs[combination] = " ".join(str(error).split())
    if all(isinstance(config, str) for config in configs.values()):
        raise ValueError(f"No combination is possible: {next(iter(configs.values()))}")
    return configs


class Trials:
    """The dense model, what all combinations share, and the tests.

    Args:
        model (`PreTrainedModel`): dense, its weights in memory.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the one of the model's own checkpoint, if it is needed.
        dataset: calibration data, as for [`NeuronALPruner.prune`].
        others (`dict[str, Any]`): fields of the config, for all combinations.
        asked (`Sequence[tuple]`): combinations of sparsity, saliency and top-up.

    Raises:
        `ValueError`: none of them is possible, or the model cannot be pruned.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        dataset,
        others: dict[str, Any],
        asked: Sequence[tuple[float, str, str]],
    ):
        self.model, self.tokenizer = model, tokenizer
        self.configs = make_configs(asked, dataset, others)
        self.methods: dict[tuple, Methods] = {
            combination: config.make_methods()
            for combination, config in self.configs.items()
            if isinstance(config, NeuronALConfig)
        }
        first = next(iter(self.methods))
        self.decoder: Decoder = check(model, self.configs[first], self.methods[first])
        if any(is_offloaded(projection.module) for projection in self.decoder.projections.values()):
            raise ValueError("compare tries weights out in memory: load the model without offloading.")
        self.calibration: CalibrationSet | None = None
        calibrated = next((key for key, methods in self.methods.items() if methods.needs_calibration), None)
        if calibrated is not None:
            self.calibration, self.tokenizer = draw_calibration(
                model, self.configs[calibrated], self.methods[calibrated], tokenizer, dataset
            )
        self.shared = Shared()

    def load_tests(self, evaluate, max_windows: int | None) -> None:
        """Token ids of every test set, once for all."""
        config = self.configs[next(iter(self.methods))]
        self.windows = {}
        for name, entry in name_test_sets(evaluate).items():
            if as_token_ids(entry) is None:
                self.tokenizer = self.tokenizer or own_tokenizer(self.model)
            self.windows[name] = load_windows(self.model.config, self.tokenizer, entry, config.seq_length, max_windows)

    def load_tasks(self, tasks: Sequence[str], limit: int | None, include_path: str | Path | None) -> None:
        """Finds tasks that are not known before the work begins."""
        self.tasks = list(tasks)
        self.task_options = {"limit": limit, "include_path": include_path}
        if self.tasks:
            self.tokenizer = self.tokenizer or own_tokenizer(self.model)
            check_tasks(self.tasks, include_path)

    @property
    def identity(self) -> dict[str, Any]:
        """What every result depends on, beside its config."""
        ids = torch.empty(0, 0, dtype=torch.int64) if self.calibration is None else self.calibration.ids
        tests = {
            name: hashlib.sha256(windows.contiguous().numpy().tobytes()).hexdigest()
            for name, windows in self.windows.items()
        }
        own = {"tests": tests, "tasks": self.tasks, **self.task_options, "versions": versions()}
        return {**identity(self.model, self.decoder, ids), **own}

    def dense(self) -> Result:
        """The dense model's figures."""
        return Result(0.0, DENSE, DENSE, **self._measured())

    def run(self, sparsity: float, saliency: str, topup: str) -> Result:
        """One combination, from search to test; the model's weights are put back."""
        combination = sparsity, saliency, topup
        config, methods = self.configs[combination], self.methods.get(combination)
        result = Result(sparsity, saliency, topup)
        if isinstance(config, str):
            result.error = config
            return result
        clock = Clock()
        reset_peak_memory()
        try:
            ids = torch.empty(0, 0, dtype=torch.int64) if self.calibration is None else self.calibration.ids
            outcome = find_changes(self.model, self.decoder, config, methods, ids, clock, shared=self.shared)
            changed = list(self.decoder.projections.values())
            report = make_report(self.decoder, config, self.calibration, outcome, clock.seconds)
            with trial_weights(changed, lambda p: outcome.changes[p.name]):
                rows = self._row_sparsity() if methods.topup.by_row else {}
                measured = self._measured()
        except EXPECTED as error:
            result.error = " ".join(f"{error}".split()) or type(error).__name__
            return result
        return Result(
            sparsity,
            saliency,
            topup,
            **measured,
            achieved_sparsity=report.achieved_sparsity,
            block_sparsity=list(report.blocks.values()),
            row_sparsity=rows,
            allocation_seconds=clock.seconds["allocation"],
            pruning_seconds=clock.seconds["pruning"],
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
            name: evaluate_perplexity(self.model, None, ids, batch_size=max(1, TOKENS_PER_FORWARD // ids.shape[1]))
            for name, ids in self.windows.items()
        }
        accuracy = {}
        if self.tasks:
            results = evaluate_tasks(self.model, self.tokenizer, self.tasks, **self.task_options)
            accuracy = {name: asdict(result) for name, result in results.items()}
        return {"perplexity": perplexity, "accuracy": accuracy}
