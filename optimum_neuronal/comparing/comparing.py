"""`compare`: prunes one model in many ways and measures each."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.memory import MemoryLimits
from ..common.notes import get_logger
from ..common.progress import progress
from ..config.config_fields import as_json
from ..data.documents import check_datasets
from ..evaluation.perplexity import as_model, begin_with_bos, name_test_sets
from ..evaluation.tasks import load_tasks
from ..files.identity import versions
from ..files.records import Records, remove_records
from ..model.public_names import public_name
from ..pruning.prepare import exclusive
from .combinations import Combinations, find_combinations
from .comparison import Comparison, check_tables_directory
from .results import DENSE, Result
from .runs import Runs


logger = get_logger(__name__)

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
    accuracy_over: Sequence[str] | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    batch_size: int | None = None,
    max_hidden_bytes: int | None = None,
    **config: Any,
) -> Comparison:
    """Prune a model in many ways, and measure the loss and the storage of each. Afterwards the model is unchanged.

    Combinations share work on the dense model; the seconds of each include all that it needs. A combination that fails is
    a result with its error. [`experiment`] has arguments for the paper's experiments.

    Args:
        model (`PreTrainedModel`, `str` or `Path`): a dense decoder model, which may be offloaded, or where to load it from.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the tokenizer of the model's own checkpoint.
        saliencies, topups (`Sequence[str]`):
            Methods, with hyperparameters if needed, as on the command line: `"owl:half_width=0.1"`.
        sparsities (`Sequence[float]`): each in [0, 1). Presets are used at each, too.
        presets (`Sequence[str]`): presets of the config to compare with.
        without (`Sequence[str]`): pairs of saliency and top-up to leave out: `"sparsegpt+dsnot"`.
        sweep (`Mapping`): field of the config -> values. Everything is run with each: `{"seed": [0, 16, 46]}`.
        dataset: calibration data, as for [`NeuronALPruner.prune`].
        evaluate (`Sequence` or `dict`): test sets, each as for [`evaluate_perplexity`]; or name -> test set.
        window (`int`, *optional*): tokens per test window. None: the smaller of 2048 and the model's limit.
        max_windows (`int`, *optional*): windows per test set.
        tasks, limit, include_path: zero-shot tasks, as for [`evaluate_tasks`].
        accuracy_over (`Sequence[str]`, *optional*): saliencies to compute AccRet over. None: the same as PPLFac.
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
        check_tables_directory(output, overwrite)
    if tasks:
        load_tasks(tasks, include_path)
    questions = {"tasks": tasks, "limit": limit, "include_path": include_path, "add_bos": config.get("add_bos")}
    memory = MemoryLimits(batch_size, max_hidden_bytes)
    runs = Runs(*as_model(model, tokenizer), combinations, dataset, questions, memory)
    runs.load_tests(tests, window, max_windows, config.get("add_bos"))
    if output is not None:
        check_tables_directory(output, overwrite, public_name(runs.model))
    with exclusive(runs.model):
        return _run_all(runs, combinations, as_json(config), as_json(accuracy_over), output, overwrite)


def _run_all(
    runs: Runs,
    combinations: Combinations,
    fields: dict[str, Any],
    accuracy_over: list[str] | None,
    output: str | Path | None,
    overwrite: bool,
) -> Comparison:
    """Measure the dense model and each combination. The tables are written after each."""
    folder = None if output is None else Path(output) / FINISHED
    if overwrite:
        remove_records(folder)
    records = Records(folder)
    dense = _recorded(records, [DENSE, {}, runs.depends_on(None)], runs.dense)
    windows = {name: list(ids.shape) for name, ids in runs.windows.items()}
    drawn = _in_common([one.to_dict() for one in runs.calibrations.values() if one is not None])
    with_bos = [name for name, ids in runs.windows.items() if begin_with_bos(ids, runs.tokenizer)]
    comparison = Comparison(
        public_name(runs.model), dense, [], drawn, versions(), windows, with_bos, fields, accuracy_over
    )
    for result, config in progress(combinations, "comparing", "combination"):
        if config is not None:
            depends_on = [result.method, config.to_dict(), runs.depends_on(runs.calibration_of(result, config))]
            result = _recorded(records, depends_on, partial(runs.run, result, config))
        if result.error is not None:
            logger.warning(f"{result.method} failed: {result.error}")
        comparison.results.append(result)
        if output is not None:
            comparison.save(output, overwrite)
    return comparison


def _in_common(calibrations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what calibration data have in common, and "several" where they differ."""
    first = calibrations[0] if calibrations else {}
    return {
        name: value if all(one[name] == value for one in calibrations) else "several" for name, value in first.items()
    }


def _recorded(records: Records, depends_on: Sequence[Any], make: Callable[[], Result]) -> Result:
    """Return a recorded result, or make and record it. Failures are not recorded."""
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode()).hexdigest()
    record = records.get(digest)
    if record is not None:
        return Result(**record[0])
    result = make()
    if result.error is None:
        records.put(digest, asdict(result), {})
    return result
