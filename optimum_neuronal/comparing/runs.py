"""Prunes of one model, measured one after the other, that share the work on the dense model."""

import hashlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..common.memory import MemoryLimits
from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import CalibrationSet, as_token_ids
from ..evaluation.perplexity import evaluate_perplexity, load_windows
from ..evaluation.tasks import check_answers, evaluate_tasks
from ..files.identity import versions
from ..model.projections import Decoder
from ..model.tokenizers import own_tokenizer
from ..pruning.checks import check_prune
from ..pruning.prepare import draw_calibration, identity, ids_of, prepare
from ..pruning.prune import changed_weights, find_changes
from ..pruning.reporting import make_report, packed_size
from ..trials import Cache
from .combinations import Combinations
from .results import DENSE, Result


# Fields of a report that a result has too.
REPORTED = ("bits_per_weight", "achieved_sparsity", "peak_memory", "block_lambda", "row_lambda", "decisions", "config")
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError, OSError)
# Fields, other than the data's, that measurements on the dense model depend on.
CACHED_BY = ("num_alignment_samples", "min_expert_tokens", "targets", "ignore")


class Runs:
    """Prunes of one model that share the work on the dense model. The weights are restored after each."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        combinations: Combinations,
        dataset: Any,
        questions: dict,
        memory: MemoryLimits,
    ):
        self.model = model
        self.questions, self.memory = questions, memory  # arguments of `evaluate_tasks` and of `prepare`
        self.task_files = _checksums(questions["include_path"])
        self.windows: dict[str, torch.Tensor] = {}  # by test set
        self.caches: dict[tuple, TimedCache] = {}  # the latest: with other data, hidden states differ
        self.calibrations: dict[tuple, CalibrationSet | None] = {}
        possible = [(result, config) for result, config in combinations if config is not None]
        self.decoder = _decoder(model, [config for _, config in possible])
        for result, config in possible:  # before any long work
            if config.methods.needs_calibration and self.calibration_of(result, config) is None:
                drawn = draw_calibration(model, config, tokenizer, result.setting.get("dataset", dataset))
                self.calibrations[_data(result, config)] = drawn
                tokenizer = tokenizer or (drawn and drawn.tokenizer)
        self.tokenizer = tokenizer
        if questions["tasks"]:
            check_answers(model)

    def load_tests(
        self, tests: Mapping[str, Any], window: int | None, max_windows: int | None, add_bos: bool | None
    ) -> None:
        """Read the test sets. Text and tasks need a tokenizer."""
        needs_tokenizer = self.questions["tasks"] or any(as_token_ids(test) is None for test in tests.values())
        if self.tokenizer is None and needs_tokenizer:
            self.tokenizer = own_tokenizer(self.model)
        for name, test in tests.items():
            self.windows[name] = load_windows(self.model.config, self.tokenizer, test, window, max_windows, add_bos)

    def calibration_of(self, result: Result, config: NeuronALConfig) -> CalibrationSet | None:
        return self.calibrations.get(_data(result, config)) if config.methods.needs_calibration else None

    def depends_on(self, calibration: CalibrationSet | None) -> dict[str, Any]:
        """Return checksums of everything but the config that results depend on."""
        tests = {
            name: [list(ids.shape), hashlib.sha256(ids.numpy().tobytes()).hexdigest()]
            for name, ids in self.windows.items()
        }
        others = {"versions": versions(), "tests": tests, "tasks": self.questions, "task files": self.task_files}
        return identity(self.decoder, ids_of(calibration)) | others

    def measure(self) -> dict[str, Any]:
        """Return perplexity and accuracy of the model with its present weights."""
        size, accuracy = {"batch_size": self.memory.batch_size}, {}
        perplexity = {name: evaluate_perplexity(self.model, None, ids, **size) for name, ids in self.windows.items()}
        if self.questions["tasks"]:
            accuracy = evaluate_tasks(self.model, self.tokenizer, **self.questions, **size)
        return {"perplexity": perplexity, "accuracy": {name: asdict(one) for name, one in accuracy.items()}}

    def dense(self) -> Result:
        size = packed_size(self.decoder, lambda projection: 0)
        return Result(0.0, DENSE, DENSE, **self.measure(), bits_per_weight=size.bits_per_weight)

    def run(self, combination: Result, config: NeuronALConfig) -> Result:
        """Return the figures of one combination, or its error."""
        try:
            key = (*(repr(getattr(config, name)) for name in CACHED_BY), *_data(combination, config))
            self.caches = {key: self.caches.get(key) or TimedCache()}
            cache = self.caches[key]
            cache.start()
            calibration = self.calibration_of(combination, config)
            context = prepare(
                self.model, config, calibration, tokenizer=self.tokenizer, cache=cache, memory=self.memory
            )
            outcome = find_changes(context)
            report = make_report(context, outcome)
            with changed_weights(context.decoder, outcome.changes):
                figures = self.measure()
        except EXPECTED as error:
            return replace(combination, error=" ".join(f"{error}".split()) or type(error).__name__)
        return replace(
            combination,
            **figures,
            **{name: getattr(report, name) for name in REPORTED},
            block_sparsity=[report.blocks.get(block.name) for block in context.decoder.blocks],
            allocation_seconds=report.seconds["allocation"] + cache.saved,
            pruning_seconds=report.seconds["pruning"],
        )


def _decoder(model: PreTrainedModel, configs: Sequence[NeuronALConfig]) -> Decoder:
    """Return the decoder of the first config that fits the model. Raise the first one's error if none does."""
    for config in configs:
        with suppress(ValueError, TypeError):
            return check_prune(model, config)
    return check_prune(model, configs[0])


def _checksums(folder: str | Path | None) -> dict[str, str]:
    """Return the checksum of every file that describes a task in a folder."""
    files = [] if folder is None else sorted(Path(folder).rglob("*.yaml"))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _data(result: Result, config: NeuronALConfig) -> tuple:
    """Return what decides the calibration data of a combination."""
    drawn_by = config.seed, config.sampling, config.num_samples, config.seq_length, config.add_bos
    return result.setting.get("dataset"), *drawn_by


class TimedCache(Cache):
    """A cache of several prunes. `saved` is the time that the current prune would need to make what was cached before."""

    def __init__(self) -> None:
        super().__init__(lasting=True)
        self.seconds: dict[Hashable, float] = {}  # key -> time in which its value was made
        self.start()

    def start(self) -> None:
        self.saved, self.asked = 0.0, set[Hashable]()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        start, known = time.perf_counter(), key in self.seconds
        value = super().get(key, make)
        self.seconds.setdefault(key, time.perf_counter() - start)
        if known and key not in self.asked:
            self.saved += self.seconds[key]
        self.asked.add(key)
        return value
