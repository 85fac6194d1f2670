"""`compare`: prunes one model in many ways and measures each."""

import copy
import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..blocks.offload import changed_weights
from ..checkpoint.saving import check_saveable, save_pruned
from ..checkpoint.writing import SaveOptions
from ..common.notes import get_logger, progress
from ..common.torch_state import UNLIMITED, MemoryLimits
from ..data.token_windows import TokenWindows
from ..evaluation.perplexity import as_model, load_tests, measure, report_tests
from ..evaluation.tasks import evaluate_tasks
from ..files.output import check_output, write_atomically
from ..files.records import versions
from ..model.load_model import checkpoint_dtype
from ..model.origin import own_tokenizer, public_name
from ..model.sparsity import KEY, packed_size
from ..pruning.prepare import PruneContext, check_prune, draw_calibration, identity, ids_of, prepare
from ..pruning.prune import find_changes, make_report, make_sparsity_config
from ..report import PruningReport
from ..trials import Cache
from .comparison import Comparison, check_tables_directory
from .results import DENSE, Result
from .study import Combination, Study


logger = get_logger(__name__)

FINISHED = "finished"  # folder of finished results in the output directory
# Fields of a report that a result has too.
REPORTED = ("bits_per_weight", "achieved_sparsity", "peak_memory", "block_lambda", "row_lambda", "decisions", "config")
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError, OSError)
# Fields, other than the data's, that measurements on the dense model depend on.
CACHED_BY = ("num_alignment_samples", "min_expert_tokens", "targets", "ignore")


def compare(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int | None = None,
    max_hidden_bytes: int | None = None,
    **arguments: Any,
) -> Comparison:
    """Prune a model in many ways, and measure the loss and the storage of each. Afterwards the model is unchanged.

    Combinations share work on the dense model; the seconds of each include all that it needs. All must be possible; one
    that fails later is a result with its error. [`experiment`] has arguments for the paper's experiments.

    Args:
        model (`PreTrainedModel`, `str` or `Path`): a dense decoder model, which may be offloaded, or where to load it from.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the tokenizer of the model's own checkpoint.
        batch_size, max_hidden_bytes (`int`, *optional*): as for [`NeuronALPruner.prune`].
        saliencies, topups (`Sequence[str]`):
            Methods, with hyperparameters if needed, as on the command line: `"owl:half_width=0.1"`. Default: `["wanda"]`, and
            `["uniform", "owl", "neuronal"]`.
        sparsities (`Sequence[float]`): each in [0, 1). Presets are used at each, too. Default: 0.6, 0.7 and 0.8.
        presets (`Sequence[str]`): presets of the config to compare with.
        without (`Sequence[str]`): pairs of saliency and top-up to leave out, such as impossible ones: `"sparsegpt+dsnot"`.
        sweep (`Mapping`): field of the config -> values. Everything is run with each: `{"seed": [0, 16, 46]}`.
        dataset: calibration data, as for [`NeuronALPruner.prune`]. Default: `"c4"`.
        evaluate (`Sequence` or `dict`):
            Test sets, each as for [`evaluate_perplexity`]; or name -> test set. Default: `["wikitext2"]`.
        window (`int`, *optional*): tokens per test window. None: the smaller of 2048 and the model's limit.
        max_windows (`int`, *optional*): windows per test set.
        tasks, limit, include_path: zero-shot tasks, as for [`evaluate_tasks`]; their questions are read once.
        accuracy_over (`Sequence[str]`, *optional*): saliencies to compute AccRet over. None: the same as PPLFac.
        output (`str` or `Path`, *optional*): directory for tables and finished results. A later call resumes from them.
        overwrite (`bool`): True runs finished combinations again, and replaces tables of another model or that no comparison wrote.
        keep (`str` or `Path`, *optional*): directory in which to save each pruned model. None: none is saved.
        arguments: all others are fields of [`NeuronALConfig`] for all combinations.

    Raises:
        `ValueError`, `TypeError`: an unknown method or preset, or a combination that is impossible, with the model or at all.
        `FileExistsError`: the directory holds a table of another model, or that no comparison wrote.
    """
    return run_study(Study.of(arguments), *as_model(model, tokenizer), MemoryLimits(batch_size, max_hidden_bytes))


def run_study(
    study: Study,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    memory: MemoryLimits = UNLIMITED,
) -> Comparison:
    """Measure the dense model, then prune, measure and restore it with each combination. Tables are written after each."""
    folder = None
    if study.folder is not None:
        check_tables_directory(study.folder, study.overwrite, public_name(model))
        folder = study.folder / FINISHED
        for file in folder.glob("*.json") if study.overwrite else ():
            file.unlink(missing_ok=True)
    runner = CombinationRunner(study, model, tokenizer, memory)
    first, *others = [one.to_dict() for one in runner.calibrations.values()] or [{}]
    comparison = Comparison(
        model=public_name(model),
        dense=finished(folder, digest(DENSE, {}, runner.depends_on(None)), runner.measure_dense),
        results=[],
        calibration={name: value for name, value in first.items() if all(one[name] == value for one in others)},
        versions=versions(),
        windows={name: (*test.ids.shape, test.begin_with_bos) for name, test in runner.windows.items()},
        config=study.config,
        accuracy_over=study.accuracy_over,
    )
    for combination in progress(study.combinations, "comparing", "combination"):
        method, config = combination.result.method, combination.config.to_dict()
        name = digest(method, config, runner.depends_on(combination))
        place = re.sub(r"[^\w.]+", "-", method)[:80] + f"-{name[:8]}"
        kept = None if study.keep is None else Path(study.keep, place)
        result = finished(folder, name, partial(runner.run, combination, kept), kept)
        if result.error is not None:
            logger.warning(f"{method} failed: {result.error}")
        comparison.results.append(result)
        if study.folder is not None:
            comparison.save(study.folder, overwrite=True)  # its tables are this comparison's
    return comparison


def digest(*depends_on: Any) -> str:
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode()).hexdigest()


def finished(folder: Path | None, name: str, make: Callable[[], Result], kept: Path | None = None) -> Result:
    """Return the result that an earlier run has finished, and whose model it has kept, or make it. Failures are not kept."""
    if folder is None:
        return make()
    path = folder / f"{name}.json"
    if kept is None or kept.exists():
        with suppress(OSError, ValueError, TypeError):  # it is absent or damaged
            return Result(**json.loads(path.read_bytes()))
    result = make()
    if result.error is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(result)).encode())
    return result


class CombinationRunner:
    """Prunes one model by one combination of a study after another, and measures each. They share work on the dense model."""

    def __init__(self, study: Study, model: PreTrainedModel, tokenizer: Any, memory: MemoryLimits):
        if tokenizer is None:
            with suppress(ValueError):  # token ids need none
                tokenizer = own_tokenizer(model)
        self.model, self.tokenizer, self.memory = model, tokenizer, memory
        self.decoder = check_prune(model, study.combinations[0].config)
        self.calibrations: dict[tuple, Any] = {}
        for one in study.combinations:  # before any long work
            check_prune(model, one.config, loaded=False)  # what it loads was checked above
            if one.config.methods.needs_calibration and one.drawn_by not in self.calibrations:
                dataset = None if one.config.dataset else one.dataset
                self.calibrations[one.drawn_by] = draw_calibration(model, one.config, tokenizer, dataset)
        self.tasks, self.add_bos = study.questions, study.config.get("add_bos")
        sizes = study.window, study.max_windows, self.add_bos
        self.windows = load_tests(study.test_sets, model, tokenizer, *sizes)
        self._cache: tuple[Any, Cache] = None, Cache()  # the latest: with other data, hidden states differ

    def run(self, combination: Combination, kept: Path | None = None) -> Result:
        """Prune the model, measure it, save it if it is kept, and undo the pruning. Return the figures, or the error."""
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
                if kept is not None:
                    self._save(context, report, figures["perplexity"], kept)
        except EXPECTED as error:
            return replace(combination.result, error=" ".join(f"{error}".split()) or type(error).__name__)
        return replace(
            combination.result,
            **figures,
            **{name: getattr(report, name) for name in REPORTED},
            block_sparsity=[report.blocks.get(block.name) for block in context.decoder.blocks],
            projection_sparsity={name: shares["sparsity"] for name, shares in report.projections.items()},
            allocation_seconds=report.seconds["allocation"] + sum(cache.saved.values()),
            pruning_seconds=report.seconds["pruning"],
        )

    def _save(self, context: PruneContext, report: PruningReport, perplexity: dict[str, float], kept: Path) -> None:
        """Save the model, whose weights are sparse now, as a pruned one."""
        model, dense = self.model, self.model.config
        report = replace(report, evaluation=report_tests(self.windows, pruned=perplexity))
        model.config = copy.copy(dense)
        setattr(model.config, KEY, make_sparsity_config(context.decoder, report))
        try:
            options = check_saveable(model, SaveOptions(dtype=checkpoint_dtype(model)))
            save_pruned(model, check_output(kept, overwrite=True), report, self.tokenizer, options)
        finally:
            model.config = dense

    def measure_dense(self) -> Result:
        size = packed_size(self.decoder, lambda projection: 0)
        return Result(0.0, DENSE, DENSE, **self._measure(), bits_per_weight=size.bits_per_weight)

    def depends_on(self, combination: Combination | None) -> dict[str, Any]:
        """Return checksums of all but the config that a result depends on; None: of the dense model."""
        calibration = None if combination is None else self._calibration_of(combination)
        return {
            **identity(self.decoder, ids_of(calibration)),
            "versions": versions(),
            "tests": {name: [list(test.ids.shape), test.sha256] for name, test in self.windows.items()},
            "tasks": [list(self.tasks.tasks), self.tasks.limit, self.tasks.files, self.add_bos],
        }

    def _measure(self) -> dict[str, Any]:
        """Return perplexity and accuracy of the model with its present weights."""
        size = self.memory.batch_size
        scores = evaluate_tasks(self.model, self.tokenizer, self.tasks, batch_size=size, add_bos=self.add_bos)
        perplexity = measure(self.model, self.windows, size)
        accuracy = {
            name: {"accuracy": one.score, "stderr": one.stderr, "samples": one.samples} for name, one in scores.items()
        }
        return {"perplexity": perplexity, "accuracy": accuracy}

    def _calibration_of(self, combination: Combination) -> TokenWindows | None:
        needed = combination.config.methods.needs_calibration
        return self.calibrations[combination.drawn_by] if needed else None

    def _cache_of(self, combination: Combination) -> Cache:
        """Return the cache of the combination before, unless what it holds depends on something else."""
        key = combination.drawn_by, [getattr(combination.config, name) for name in CACHED_BY]
        if self._cache[0] != key:
            self._cache = key, Cache(lasting=True)
        self._cache[1].saved.clear()
        return self._cache[1]
