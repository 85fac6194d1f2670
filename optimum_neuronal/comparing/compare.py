"""`compare`: prunes one model in many ways and measures each."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.notes import get_logger
from ..common.progress import progress
from ..common.torch_state import UNLIMITED, MemoryLimits
from ..evaluation.perplexity import as_model
from ..files.output import write_atomically
from ..files.records import versions
from ..model.origin import public_name
from ..pruning.prepare import exclusive
from .combination_runner import CombinationRunner
from .comparison import SEVERAL, Comparison
from .results import DENSE, Result
from .study import Evaluation, Grid, Study


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
        tasks, limit, include_path: zero-shot tasks, as for [`evaluate_tasks`]; their questions are read once.
        accuracy_over (`Sequence[str]`, *optional*): saliencies to compute AccRet over. None: the same as PPLFac.
        output (`str` or `Path`, *optional*): directory for tables and finished results. A later call resumes from them.
        overwrite (`bool`): True runs finished combinations again, and replaces tables of another model or that no comparison wrote.
        batch_size, max_hidden_bytes (`int`, *optional*): as for [`NeuronALPruner.prune`].
        config: further fields of [`NeuronALConfig`] for all combinations.

    Raises:
        `ValueError`, `TypeError`: unknown methods or presets, or a model and data that no combination can work with.
        `FileExistsError`: the directory holds a table of another model, or that no comparison wrote.
    """
    grid = Grid(saliencies, topups, sparsities, presets, without, sweep, dataset, config)
    evaluation = Evaluation(evaluate, window, max_windows, tasks, limit, include_path)
    study = Study(grid, evaluation, accuracy_over, output, overwrite)
    return run_study(study, *as_model(model, tokenizer), MemoryLimits(batch_size, max_hidden_bytes))


def run_study(
    study: Study,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    memory: MemoryLimits = UNLIMITED,
) -> Comparison:
    """Measure the dense model, then prune, measure and restore it with each combination. Tables are written after each."""
    study.check_output(public_name(model))
    folder = study.output and study.output / FINISHED
    if folder is not None and study.overwrite:
        for file in folder.glob("*.json"):
            file.unlink(missing_ok=True)
    with exclusive(model):
        runner = CombinationRunner(study, model, tokenizer, memory)
        dense = finished(folder, [DENSE, {}, runner.depends_on(None)], runner.measure_dense)
        comparison = Comparison(
            model=public_name(model),
            dense=dense,
            results=[],
            calibration=_in_common([one.to_dict() for one in runner.calibrations.values()]),
            versions=versions(),
            windows={name: list(test.ids.shape) for name, test in runner.windows.items()},
            with_bos=[name for name, test in runner.windows.items() if test.begin_with_bos],
            config=study.config,
            accuracy_over=study.accuracy_over,
        )
        for combination in progress(study.combinations, "comparing", "combination"):
            result = combination.result
            if combination.config is not None:
                depends_on = [result.method, combination.config.to_dict(), runner.depends_on(combination)]
                result = finished(folder, depends_on, partial(runner.run, combination))
            if result.error is not None:
                logger.warning(f"{result.method} failed: {result.error}")
            comparison.results.append(result)
            if study.output is not None:
                comparison.save(study.output, overwrite=True)  # its tables are this comparison's
    return comparison


def finished(folder: Path | None, depends_on: Sequence[Any], make: Callable[[], Result]) -> Result:
    """Return the result that an earlier run has finished, or make it. Failures are not kept."""
    if folder is None:
        return make()
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode()).hexdigest()
    path = folder / f"{digest}.json"
    with suppress(OSError, ValueError, TypeError):  # it is absent or damaged
        return Result(**json.loads(path.read_bytes()))
    result = make()
    if result.error is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(result)).encode())
    return result


def _in_common(calibrations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what calibration data have in common, and "several" where they differ."""
    first = calibrations[0] if calibrations else {}
    return {
        name: value if all(one[name] == value for one in calibrations) else SEVERAL for name, value in first.items()
    }
