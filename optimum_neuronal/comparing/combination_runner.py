"""Prunes one model by one combination after another, and measures each."""

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from transformers import PreTrainedModel

from ..blocks.offload import changed_weights
from ..common.torch_state import MemoryLimits
from ..data.token_windows import TokenWindows
from ..evaluation.test_sets import load_tests, measure
from ..files.records import versions
from ..model.origin import own_tokenizer
from ..model.projections import Decoder
from ..pruning.checks import check_prune
from ..pruning.prepare import draw_calibration, identity, ids_of, prepare
from ..pruning.prune import find_changes
from ..pruning.reporting import make_report, packed_size
from ..trials import Cache
from .results import DENSE, Result
from .study import Combination, Study


# Fields of a report that a result has too.
REPORTED = ("bits_per_weight", "achieved_sparsity", "peak_memory", "block_lambda", "row_lambda", "decisions", "config")
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError, OSError)
# Fields, other than the data's, that measurements on the dense model depend on.
CACHED_BY = ("num_alignment_samples", "min_expert_tokens", "targets", "ignore")


class CombinationRunner:
    """Prunes one model by one combination of a study after another, and measures each. They share work on the dense model."""

    def __init__(self, study: Study, model: PreTrainedModel, tokenizer: Any, memory: MemoryLimits):
        if tokenizer is None:
            with suppress(ValueError):  # token ids need none
                tokenizer = own_tokenizer(model)
        self.model, self.tokenizer, self.memory = model, tokenizer, memory
        possible = [one for one in study.combinations if one.config is not None]
        self.decoder = _decoder(model, possible)
        self.calibrations: dict[tuple, TokenWindows] = {}
        for one in possible:  # before any long work
            if one.config.methods.needs_calibration and one.drawn_by not in self.calibrations:
                dataset = None if one.config.dataset else one.dataset
                self.calibrations[one.drawn_by] = draw_calibration(model, one.config, tokenizer, dataset)
        self.tasks, self.add_bos = study.tasks, study.config.get("add_bos")
        sizes = study.window, study.max_windows, self.add_bos
        self.windows = load_tests(study.test_sets, model, tokenizer, *sizes)
        self._cache: tuple[Any, TimedCache] = None, TimedCache()  # the latest: with other data, hidden states differ

    def run(self, combination: Combination) -> Result:
        """Prune the model, measure it, and undo the pruning. Return the figures, or the error."""
        cache, config = self._cache_of(combination), combination.config
        try:
            calibration = self._calibration_of(combination)
            context = prepare(
                self.model, config, calibration, tokenizer=self.tokenizer, cache=cache, memory=self.memory
            )
            outcome = find_changes(context)
            report = make_report(context, outcome)
            with changed_weights(context.decoder, outcome.changes):
                figures = self._measure()
        except EXPECTED as error:
            return replace(combination.result, error=" ".join(f"{error}".split()) or type(error).__name__)
        return replace(
            combination.result,
            **figures,
            **{name: getattr(report, name) for name in REPORTED},
            block_sparsity=[report.blocks.get(block.name) for block in context.decoder.blocks],
            allocation_seconds=report.seconds["allocation"] + cache.saved,
            pruning_seconds=report.seconds["pruning"],
        )

    def measure_dense(self) -> Result:
        size = packed_size(self.decoder, lambda projection: 0)
        return Result(0.0, DENSE, DENSE, **self._measure(), bits_per_weight=size.bits_per_weight)

    def depends_on(self, combination: Combination | None) -> dict[str, Any]:
        """Return checksums of all but the config that a result depends on; None: of the dense model."""
        calibration = combination and self._calibration_of(combination)
        return {
            **identity(self.decoder, ids_of(calibration)),
            "versions": versions(),
            "tests": {name: [list(test.ids.shape), test.sha256] for name, test in self.windows.items()},
            "tasks": [list(self.tasks.tasks), self.tasks.limit, self.tasks.files, self.add_bos],
        }

    def _measure(self) -> dict[str, Any]:
        """Return perplexity and accuracy of the model with its present weights."""
        size = self.memory.batch_size
        accuracy = self.tasks.measure(self.model, self.tokenizer, size, self.add_bos)
        perplexity = measure(self.model, self.windows, size)
        return {"perplexity": perplexity, "accuracy": {name: asdict(one) for name, one in accuracy.items()}}

    def _calibration_of(self, combination: Combination) -> TokenWindows | None:
        needed = combination.config.methods.needs_calibration
        return self.calibrations[combination.drawn_by] if needed else None

    def _cache_of(self, combination: Combination) -> "TimedCache":
        """Return the cache of the combination before, unless what it holds depends on something else."""
        key = combination.drawn_by, [getattr(combination.config, name) for name in CACHED_BY]
        if self._cache[0] != key:
            self._cache = key, TimedCache()
        self._cache[1].start()
        return self._cache[1]


def _decoder(model: PreTrainedModel, combinations: Sequence[Combination]) -> Decoder:
    """Return the decoder of the first combination that fits the model. Raise the first one's error if none does."""
    for combination in combinations:
        with suppress(ValueError, TypeError):
            return check_prune(model, combination.config)
    return check_prune(model, combinations[0].config)


class TimedCache(Cache):
    """A cache of several combinations. `saved` is the time that the current one would need to make what was cached before."""

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
