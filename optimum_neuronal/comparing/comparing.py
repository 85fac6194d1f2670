"""`compare`: prunes one model in many ways and measures each."""

import hashlib
import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.notes import get_logger
from ..common.progress import progress
from ..config.config_fields import as_json
from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import CalibrationSet, as_token_ids
from ..data.documents import check_datasets
from ..evaluation.perplexity import as_model, evaluate_perplexity, load_windows, name_test_sets
from ..evaluation.tasks import check_answers, evaluate_tasks, load_tasks
from ..files.records import Records, remove_records
from ..model.load_model import own_tokenizer, public_name
from ..model.projections import Decoder
from ..pruning.checks import check_prune
from ..pruning.prepare import draw_calibration, exclusive, identity, ids_of, prepare, versions
from ..pruning.prune import changed_weights, find_changes
from ..pruning.reporting import make_report, packed_size
from ..trials import Cache
from .combinations import Combinations, find_combinations
from .comparison import Comparison, check_output
from .results import DENSE, Result


logger = get_logger(__name__)

# Fields of a report that a result has too.
REPORTED = ("bits_per_weight", "achieved_sparsity", "peak_memory", "block_lambda", "row_lambda", "decisions", "config")
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError, OSError)
# Fields, besides those of the data, that measurements on the dense model depend on.
CACHED_BY = ("num_alignment_samples", "min_expert_tokens", "targets", "ignore")
FINISHED = "finished"  # folder of finished results in the output directory


def compare(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    saliencies: Sequence[str] = ("wanda",),
    topups: Sequence[str] = ("uniform", "owl", "neuronal"),
    sparsities: Sequence[float] = (0.6, 0.7, 0.8),
    presets: Sequence[str] = (),
    without: Sequence[str] = (),
    sweep: Mapping[str, Sequence[Any]] | None = None,
    dataset: Any = "c4",
    evaluate: Sequence | Mapping[str, Any] = ("wikitext2",),
    window: int | None = None,
    max_windows: int | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    include_path: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    batch_size: int | None = None,
    max_hidden_bytes: int | None = None,
    **config: Any,
) -> Comparison:
    """Prune a model in many ways, and measure the loss and the storage of each. Afterwards the model is as before.

    Combinations share work on the dense model; the seconds of each include all that it needs. A combination that fails is
    a result with its error. `comparing/experiments.py` has arguments for the paper's experiments.

    Args:
        model (`PreTrainedModel`, `str` or `Path`): a dense decoder model, which may be offloaded, or where to load it from.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the tokenizer of the model's own checkpoint.
        saliencies, topups (`Sequence[str]`): methods, with hyper-parameters if needed: `"owl:half_width=0.1"`.
        sparsities (`Sequence[float]`): each in [0, 1). Presets are used at each, too.
        presets (`Sequence[str]`): presets of the config to compare with.
        without (`Sequence[str]`): pairs of saliency and top-up to leave out: `"sparsegpt+dsnot"`.
        sweep (`Mapping`): field of the config -> values. Everything is run with each: `{"seed": [0, 16, 46]}`.
        dataset: calibration data, as for [`NeuronALPruner.prune`].
        evaluate (`Sequence` or `dict`): test sets, each as for [`evaluate_perplexity`]; or name -> test set.
        window (`int`, *optional*): tokens per test window. None: the smaller of 2048 and the model's limit.
        max_windows (`int`, *optional*): windows per test set.
        tasks, limit, include_path: zero-shot tasks, as for [`evaluate_tasks`].
        output (`str` or `Path`, *optional*): directory for tables and finished results. A later call resumes from them.
        overwrite (`bool`): True runs finished combinations again, and replaces tables that no comparison wrote.
        batch_size, max_hidden_bytes (`int`, *optional*): as for [`NeuronALPruner.prune`].
        config: further fields of [`NeuronALConfig`] for all combinations.

    Raises:
        `ValueError`, `TypeError`: unknown methods or presets, or a model and data that no combination can work with.
        `FileExistsError`: the directory holds a table that no comparison wrote.
    """
    ways = (saliencies, topups, sparsities, presets, without, sweep)
    combinations = find_combinations(*ways, dataset, config)
    tests = name_test_sets(evaluate)
    check_datasets([dataset, *(sweep or {}).get("dataset", ()), *tests.values()])
    if output is not None:
        check_output(output, overwrite)
    if tasks:
        load_tasks(tasks, include_path)
    questions = {"tasks": tasks, "limit": limit, "include_path": include_path}
    memory = {"batch_size": batch_size, "max_hidden_bytes": max_hidden_bytes}
    runs = Runs(*as_model(model, tokenizer), combinations, dataset, questions, memory, output)
    runs.load_tests(tests, window, max_windows)
    with exclusive(runs.model):
        return _run_all(runs, combinations, as_json(config), output, overwrite)


def _run_all(
    runs: "Runs", combinations: Combinations, fields: dict[str, Any], output: str | Path | None, overwrite: bool
) -> Comparison:
    """Measure the dense model and each combination. The tables are written after each."""
    folder = None if output is None else Path(output) / FINISHED
    if overwrite:
        remove_records(folder)
    records = Records(folder)
    dense = _recorded(records, [DENSE, {}, runs.depends_on(None)], runs.dense)
    windows = {name: list(ids.shape) for name, ids in runs.windows.items()}
    drawn = next((own.to_dict() for own in runs.calibrations.values() if own is not None), {})
    comparison = Comparison(public_name(runs.model), dense, [], drawn, versions(), windows, fields)
    for result, own in progress(combinations, "comparing", "combination"):
        if own is not None:
            depends_on = [result.method, own.to_dict(), runs.depends_on(runs.calibration_of(result, own))]
            result = _recorded(records, depends_on, partial(runs.run, result, own))
        if result.error is not None:
            logger.warning(f"{result.method} failed: {result.error}")
        comparison.results.append(result)
        if output is not None:
            comparison.save(output, overwrite)
    return comparison


def _recorded(records: Records, depends_on: Sequence[Any], make: Callable[[], Result]) -> Result:
    """Return a recorded result, or make and record it. Failures are not recorded."""
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode()).hexdigest()
    found = records.get(digest)
    if found is not None:
        return Result(**found[0])
    result = make()
    if result.error is None:
        records.put(digest, asdict(result), {})
    return result


class Runs:
    """Prunes of one model that share the work on the dense model. The weights are restored after each."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        combinations: Combinations,
        dataset: Any,
        questions: dict,
        memory: dict,
        output: str | Path | None,
    ):
        self.model = model
        self.questions, self.memory = questions, memory  # arguments of `evaluate_tasks` and of `check`
        self.task_files = _checksums(questions["include_path"], output)
        self.windows: dict[str, torch.Tensor] = {}  # by test set
        self.caches: dict[tuple, TimedCache] = {}  # the latest: with other data, hidden states differ
        self.calibrations: dict[tuple, CalibrationSet | None] = {}
        possible = [(result, config) for result, config in combinations if config is not None]
        self.decoder = _decoder(model, [config for _, config in possible], memory)
        for result, config in possible:  # before any long work
            if config.methods.needs_calibration and self.calibration_of(result, config) is None:
                drawn = draw_calibration(model, config, tokenizer, result.setting.get("dataset", dataset))
                self.calibrations[_data(result, config)] = drawn
                tokenizer = tokenizer or (drawn and drawn.tokenizer)
        self.tokenizer = tokenizer
        if questions["tasks"]:
            check_answers(model)

    def load_tests(self, tests: Mapping[str, Any], window: int | None, max_windows: int | None) -> None:
        """Read the test sets. Text and tasks need a tokenizer."""
        if self.tokenizer is None and (
            self.questions["tasks"] or any(as_token_ids(t) is None for t in tests.values())
        ):
            self.tokenizer = own_tokenizer(self.model)
        for name, test in tests.items():
            self.windows[name] = load_windows(self.model.config, self.tokenizer, test, window, max_windows)

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
        size, accuracy = {"batch_size": self.memory["batch_size"]}, {}
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
            context = prepare(self.model, config, calibration, tokenizer=self.tokenizer, cache=cache, **self.memory)
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


def _decoder(model: PreTrainedModel, configs: Sequence[NeuronALConfig], memory: Mapping[str, Any]) -> Decoder:
    """Return the decoder of the first config that fits the model. Raise the first error if none does."""
    errors: list[Exception] = []
    for config in configs:
        try:
            return check_prune(model, config, **memory)
        except (ValueError, TypeError) as error:
            errors.append(error)
    raise errors[0]


def _checksums(folder: str | Path | None, output: str | Path | None) -> dict[str, str]:
    """Return the checksum of every file in a folder of tasks, but not of the output, which may be inside it."""
    files = [] if folder is None else sorted(path for path in Path(folder).rglob("*") if path.is_file())
    own = None if output is None else Path(output).resolve()
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if own not in path.resolve().parents
    }


def _data(result: Result, config: NeuronALConfig) -> tuple:
    """Return what decides the calibration data of a combination."""
    return result.setting.get("dataset"), config.seed, config.num_samples, config.seq_length


class TimedCache(Cache):
    """A cache of several prunes. `saved` is the time that the current prune would need to make what it found here."""

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
