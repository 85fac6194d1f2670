"""`compare`: every combination of saliency, top-up, sparsity and bits on one model that is loaded once."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..checkpoint.hub import public_name
from ..evaluation.evaluated_model import as_model
from ..files.atomic import write_durably
from ..pruning.context import alone_with, versions
from ..system.notes import get_logger
from .comparison import Comparison, check_output
from .measuring import Measurements
from .results import DENSE, Result
from .settings import Combination, ComparisonSettings


logger = get_logger(__name__)

RECORDS = "results"  # folder of finished results in the output directory
LONGEST = 80  # characters of a method's name in that of a file; a digest makes it unique


def compare(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    saliencies: Sequence[str] = ComparisonSettings.saliencies,
    topups: Sequence[str] = ComparisonSettings.topups,
    sparsities: Sequence[float] = ComparisonSettings.sparsities,
    value_bits: Sequence[int | None] | int | None = (None,),
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
    """Prune a model in many ways; measure the loss and the storage of each. Afterwards the model is as before.

    Combinations share the work on the dense model. A combination that fails is a result with its error.

    Args:
        model (`PreTrainedModel`, `str` or `Path`): a dense decoder model with its weights in memory, or where to load it from.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the tokenizer of the model's own checkpoint.
        saliencies, topups (`Sequence[str]`): methods, with hyper-parameters if wanted: `"owl:half_width=0.1"`.
        sparsities (`Sequence[float]`): each in [0, 1).
        value_bits (`Sequence` or `int`, *optional*):
            Bits of each quantised value: 8, 4, 3, 2, or None, which leaves values as they are.
        dataset: calibration data, as for [`NeuronALPruner.prune`].
        evaluate (`Sequence` or `dict`): test sets, each as for [`evaluate_perplexity`]; or name -> test set.
        tasks, limit, include_path: zero-shot tasks, as for [`evaluate_tasks`].
        max_windows (`int`, *optional*): windows per test set.
        output (`str` or `Path`, *optional*):
            Directory for tables and for finished results, which a later call does not run again.
        overwrite (`bool`):
            True runs finished combinations again, and permits to replace files that no comparison wrote.
        batch_size, max_hidden_bytes (`int`, *optional*): as for [`NeuronALPruner.prune`].
        config: further fields of [`NeuronALConfig`] for all combinations: `num_samples`, `seq_length`, ...

    Raises:
        `ValueError`, `TypeError`: unknown methods, or a model and data that no combination can work with.
        `RuntimeError`: another thread prunes the model.
        `FileExistsError`: the directory holds a file with the name of a table, and no comparison wrote it.
    """
    chosen: dict[str, Any] = {"saliencies": saliencies, "topups": topups, "sparsities": sparsities}
    chosen |= {"value_bits": value_bits, "dataset": dataset, "evaluate": evaluate, "max_windows": max_windows}
    chosen |= {"tasks": tasks, "limit": limit, "include_path": include_path}
    chosen |= {"batch_size": batch_size, "max_hidden_bytes": max_hidden_bytes}
    settings = ComparisonSettings(**chosen, config=config)
    if output is not None:
        check_output(output, overwrite)
    return run_comparison(*as_model(model, tokenizer), settings, output, overwrite)


def run_comparison(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    settings: ComparisonSettings,
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Comparison:
    """Return the comparison with these settings. Other arguments and errors are those of [`compare`]."""
    measurements = Measurements(model, tokenizer, settings)
    records = None if output is None else Path(output) / RECORDS
    find = partial(_recorded, records, overwrite, measurements.identity())
    with alone_with(model):
        dense = find(Combination(0.0, DENSE, DENSE), {}, measurements.dense)
        calibration = measurements.calibration.to_dict() if measurements.calibration is not None else {}
        comparison = Comparison(public_name(model), dense, [], calibration, versions())
        for combination, config in logging.tqdm(settings.configs.items(), desc="Comparing", unit="combination"):
            fields = config if isinstance(config, str) else config.to_dict()
            result = find(combination, fields, partial(measurements.run, combination))
            if result.error is not None:
                logger.warning(f"{result.method} failed: {result.error}")
            comparison.results.append(result)
            if output is not None:
                comparison.save(output, overwrite)
    return comparison


def _recorded(
    folder: Path | None,
    overwrite: bool,
    depends_on: Mapping[str, Any],
    combination: Combination,
    config: Mapping[str, Any] | str,
    make: Callable[[], Result],
) -> Result:
    """Return the recorded result of a combination, or make and record it. Failures are not recorded.

    The name of a record holds a digest of `depends_on` and of the config, so that no other result is taken for it.
    """
    if folder is None:
        return make()
    content = json.dumps([config, depends_on], sort_keys=True, default=str)
    words = [f"{combination.sparsity:g}", combination.saliency, combination.topup]
    words += [] if combination.value_bits is None else [f"{combination.value_bits}bits"]
    words = [re.sub(r"[^\w.-]", "_", word)[:LONGEST] for word in words]
    path = folder / ("-".join([*words, hashlib.sha256(content.encode()).hexdigest()[:12]]) + ".json")
    if path.exists() and not overwrite:
        with suppress(ValueError, TypeError):  # a damaged record is made again
            return Result(**json.loads(path.read_text(encoding="utf-8")))
    result = make()
    if result.error is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(path, (json.dumps(asdict(result), indent=2) + "\n").encode())
    return result
