"""`compare`: prunes one model in many ways and measures each."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..common.machine import reset_peak_memory
from ..common.notes import get_logger
from ..compat.hf_private import is_offloaded
from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import as_token_ids
from ..data.documents import check_datasets
from ..evaluation.perplexity import as_model, evaluate_perplexity, load_windows, name_test_sets
from ..evaluation.tasks import evaluate_tasks, load_tasks
from ..model.projections import trial_weights
from ..pruning.context import PruneContext, check, default_batch_size, exclusive
from ..pruning.prune import draw_calibration, find_changes, identity, maybe_rotated, own_tokenizer
from ..pruning.reporting import make_report, packed_size, public_name, versions
from ..trials import Cache
from .combinations import find_combinations
from .comparison import Comparison, check_output
from .results import DENSE, Result


logger = get_logger(__name__)

# Fields of a report that a result has too.
REPORTED = ("bits_per_weight", "achieved_sparsity", "peak_memory", "block_lambda", "row_lambda", "decisions", "config")
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError, OSError)
RECORDS = "results.jsonl"  # finished results in the output directory


def compare(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    saliencies: Sequence[str] = ("wanda",),
    topups: Sequence[str] = ("uniform", "neuronal", "search"),
    sparsities: Sequence[float] = (0.6, 0.7, 0.8),
    presets: Sequence[str] = (),
    bits_per_weight: Sequence[float] = (),
    dataset: Any = "c4",
    evaluate: Sequence | Mapping[str, Any] = ("wikitext2",),
    tasks: Sequence[str] = (),
    limit: int | None = None,
    include_path: str | Path | None = None,
    max_windows: int | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    batch_size: int | None = None,
    max_hidden_bytes: int | None = None,
    **config: Any,
) -> Comparison:
    """Prune a model in many ways, and measure the loss and the storage of each. Afterwards the model is as before.

    Combinations share the work on the dense model. A combination that fails is a result with its error.

    Args:
        model (`PreTrainedModel`, `str` or `Path`): a dense decoder model in memory, or where to load it from.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the tokenizer of the model's own checkpoint.
        saliencies, topups (`Sequence[str]`): methods, with hyper-parameters if needed: `"owl:half_width=0.1"`.
        sparsities (`Sequence[float]`): each in [0, 1). Presets are used at each, too.
        bits_per_weight (`Sequence[float]`): budgets of quantized models to compare with.
        dataset: calibration data, as for [`NeuronALPruner.prune`].
        evaluate (`Sequence` or `dict`): test sets, each as for [`evaluate_perplexity`]; or name -> test set.
        tasks, limit, include_path: zero-shot tasks, as for [`evaluate_tasks`].
        max_windows (`int`, *optional*): windows per test set.
        output (`str` or `Path`, *optional*): directory for tables and finished results. A later call resumes from them.
        overwrite (`bool`): True runs finished combinations again, and replaces tables that no comparison wrote.
        batch_size, max_hidden_bytes (`int`, *optional*): as for [`NeuronALPruner.prune`].
        config: further fields of [`NeuronALConfig`] for all combinations.

    Raises:
        `ValueError`, `TypeError`: unknown methods or presets, or a model and data that no combination can work with.
        `FileExistsError`: the directory holds a table that no comparison wrote.
    """
    combinations = find_combinations(saliencies, topups, sparsities, presets, bits_per_weight, dataset, config)
    tests = name_test_sets(evaluate)
    check_datasets([dataset, *tests.values()])
    if output is not None:
        check_output(output, overwrite)
    if tasks:
        load_tasks(tasks, include_path)
    model, tokenizer = as_model(model, tokenizer)
    configs = [config for _, config in combinations if config is not None]
    first = max(configs, key=lambda config: config.methods.needs_calibration)
    context = check(model, first, batch_size, max_hidden_bytes)
    context = replace(context, calibration=draw_calibration(model, first, tokenizer, dataset))
    runs = Runs(context, tokenizer, tests, max_windows, {"tasks": tasks, "limit": limit, "include_path": include_path})
    records = Records(output, overwrite, runs.depends_on())
    with exclusive(model):
        drawn = {} if context.calibration is None else context.calibration.to_dict()
        dense = records.find(Result(0.0, DENSE, DENSE), {}, runs.dense)
        comparison = Comparison(public_name(model), dense, [], drawn, versions())
        for result, own in logging.tqdm(combinations, "Comparing", unit="combination", disable=None):
            if own is not None:
                result = records.find(result, own.to_dict(), partial(runs.run, result, own))
            if result.error is not None:
                logger.warning(f"{result.method} failed: {result.error}")
            comparison.results.append(result)
            if output is not None:
                comparison.save(output, overwrite)
    return comparison


class Runs:
    """Prunes of one model that share the work on the dense model. The weights are restored after each."""

    def __init__(
        self, context: PruneContext, tokenizer: Any, tests: Mapping[str, Any], max_windows: Any, tasks: dict[str, Any]
    ):
        self.context, self.model, self.tasks = context, context.model, tasks  # tasks: arguments of evaluate_tasks
        if any(is_offloaded(projection.module) for projection in context.decoder.projections.values()):
            raise ValueError("compare tries weights in memory: load the model without offloading.")
        self.tokenizer = tokenizer or (context.calibration and context.calibration.tokenizer)
        if self.tokenizer is None and (tasks["tasks"] or any(as_token_ids(test) is None for test in tests.values())):
            self.tokenizer = own_tokenizer(self.model)
        options = {"seq_length": context.config.seq_length, "max_windows": max_windows}
        self.windows = {
            name: load_windows(self.model.config, self.tokenizer, test, **options) for name, test in tests.items()
        }
        self.caches: dict[Any, Cache] = {}  # the latest rotation's: another has other hidden states

    def depends_on(self) -> dict[str, Any]:
        """Return checksums of everything but the config that results depend on."""
        tests = {name: hashlib.sha256(ids.numpy().tobytes()).hexdigest() for name, ids in self.windows.items()}
        same = identity(self.model, self.context.decoder, self.context.ids)
        return {**same, "versions": versions(), "tests": tests, "tasks": self.tasks}

    def measure(self) -> dict[str, Any]:
        """Return perplexity and accuracy of the model with its present weights."""
        perplexity = {
            name: evaluate_perplexity(self.model, None, ids, batch_size=default_batch_size(ids.shape[1]))
            for name, ids in self.windows.items()
        }
        accuracy = evaluate_tasks(self.model, self.tokenizer, **self.tasks) if self.tasks["tasks"] else {}
        return {"perplexity": perplexity, "accuracy": {name: asdict(one) for name, one in accuracy.items()}}

    def dense(self) -> Result:
        """Return the figures of the dense model."""
        size = packed_size(self.context.decoder, lambda projection: 0)
        return Result(0.0, DENSE, DENSE, **self.measure(), bits_per_weight=size.bits_per_weight)

    def run(self, combination: Result, config: NeuronALConfig) -> Result:
        """Return the figures of one combination, or its error."""
        reset_peak_memory()
        try:
            methods = config.methods
            self.caches = {methods.rotation: self.caches.get(methods.rotation) or Cache(lasting=True)}
            shared = {name: getattr(self.context, name) for name in ("calibration", "batch_size", "max_hidden_bytes")}
            context = PruneContext(
                self.context.decoder, config, methods, cache=self.caches[methods.rotation], **shared
            )
            with maybe_rotated(context, always_undo=True) as facts:
                outcome = find_changes(context)
                report = make_report(context, outcome, {}, facts)
                projections = list(context.decoder.projections.values())
                with trial_weights(projections, lambda p: outcome.changes[p.name]):
                    figures = self.measure()
        except EXPECTED as error:
            return replace(combination, error=" ".join(f"{error}".split()) or type(error).__name__)
        return replace(
            combination,
            **figures,
            **{name: getattr(report, name) for name in REPORTED},
            block_sparsity=list(report.blocks.values()),
            rotation_seconds=report.seconds.get("rotation", 0.0),
            allocation_seconds=report.seconds["allocation"],
            pruning_seconds=report.seconds["pruning"],
        )


class Records:
    """Finished results in a directory, one per line, each with a digest of all that it depends on."""

    def __init__(self, output: str | Path | None, overwrite: bool, depends_on: Mapping[str, Any]):
        self.path = None if output is None else Path(output) / RECORDS
        self.depends_on = depends_on
        self.known: dict[str, Result] = {}
        if self.path is None or not self.path.exists():
            return
        if overwrite:
            self.path.unlink()
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError, KeyError):  # an interruption left half a line
                record = json.loads(line)
                self.known[record["digest"]] = Result(**record["result"])

    def find(self, combination: Result, config: Mapping[str, Any], make: Callable[[], Result]) -> Result:
        """Return a recorded result, or make and record it. Failures are not recorded."""
        text = json.dumps([combination.method, config, self.depends_on], sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest in self.known:
            return self.known[digest]
        result = make()
        if self.path is not None and result.error is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps({"digest": digest, "result": asdict(result)}))
        return result
