"""`compare`: every combination of saliency, top-up, sparsity and bits on one model that is loaded once."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..checkpoint.hub import public_name
from ..evaluation.loading import as_model
from ..model.identity import versions
from ..pruning.context import alone_with
from ..system.notes import get_logger
from .asked import Asked, Combination, check_asked
from .comparison import TABLES, Comparison
from .result_records import ResultRecords
from .results import DENSE
from .trials import Trials
from .written_files import WrittenFiles


logger = get_logger(__name__)

DEFAULTS: dict[str, Any] = {
    "saliencies": ("wanda",),
    "topups": ("uniform", "neuronal", "search"),
    "sparsities": (0.6, 0.7, 0.8),
    "value_bits": (None,),
}


def compare(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    saliencies: Sequence[str] = DEFAULTS["saliencies"],
    topups: Sequence[str] = DEFAULTS["topups"],
    sparsities: Sequence[float] = DEFAULTS["sparsities"],
    value_bits: Sequence[int | None] | int | None = DEFAULTS["value_bits"],
    dataset: Any = "c4",
    evaluate: Sequence | Mapping[str, Any] = ("wikitext2",),
    tasks: Sequence[str] = (),
    limit: int | None = None,
    include_path: str | Path | None = None,
    max_windows: int | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    **config: Any,
) -> Comparison:
    """Prunes a model in many ways and measures what each loses, and how many bits a weight it takes. The model is as before afterwards.

    What the dense model does is measured once for all. A combination that fails is a result with its error.

    Args:
        model (`PreTrainedModel`, `str` or `Path`): a dense decoder model with its weights in memory, or where to load it from.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the one of the model's own checkpoint.
        saliencies, topups (`Sequence[str]`): methods, with hyper-parameters if wanted: `"owl:half_width=0.1"`.
        sparsities (`Sequence[float]`): each in [0, 1).
        value_bits (`Sequence` or `int`, *optional*):
            To how many bits kept values are rounded: each 8, 4, 3, 2, or None, which leaves them as they are.
        dataset: calibration data, as for [`NeuronALPruner.prune`].
        evaluate (`Sequence` or `dict`): test sets, each as for [`evaluate_perplexity`]; or name -> test set.
        tasks, limit, include_path: zero-shot tasks, as for [`evaluate_tasks`].
        max_windows (`int`, *optional*): windows per test set.
        output (`str` or `Path`, *optional*): directory for tables and for results, from which a later call goes on.
        overwrite (`bool`): whether to run again what is finished there, and to replace tables that others wrote or edited.
        config: further fields of [`NeuronALConfig`] for all combinations: `num_samples`, `seq_length`, ...

    Raises:
        `ValueError`, `TypeError`: unknown methods, or a model and data that no combination can work with.
        `RuntimeError`: another thread prunes the model.
        `FileExistsError`: the directory holds a file under the name of a table that no comparison wrote, or that was edited.
    """
    asked = check_asked(
        saliencies=saliencies,
        topups=topups,
        sparsities=sparsities,
        value_bits=value_bits,
        dataset=dataset,
        evaluate=evaluate,
        config=config,
        max_windows=max_windows,
        tasks=tasks,
        limit=limit,
        include_path=include_path,
    )
    if output is not None:
        WrittenFiles(output, overwrite).check(TABLES)
    return compare_asked(*as_model(model, tokenizer), asked, output, overwrite)


def compare_asked(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    asked: Asked,
    output: str | Path | None = None,
    overwrite: bool = False,
) -> Comparison:
    """[`compare`] behind its checks. Arguments and errors are those of [`compare`], `asked` is from [`check_asked`]."""
    trials = Trials(model, tokenizer, asked)
    with alone_with(model):
        return _run(trials, ResultRecords(output, overwrite, trials.identity), output, overwrite)


def _run(trials: Trials, records: ResultRecords, output: str | Path | None, overwrite: bool) -> Comparison:
    calibration = trials.calibration.to_dict() if trials.calibration is not None else {}
    name = public_name(trials.model)
    dense = records.get_or_make(Combination(0.0, DENSE, DENSE), {}, trials.dense)
    comparison = Comparison(name, dense, [], calibration, versions())
    configs = trials.asked.configs
    for combination, config in logging.tqdm(configs.items(), desc="Comparing", unit="combination"):
        fields_of_config = config if isinstance(config, str) else config.to_dict()
        result = records.get_or_make(combination, fields_of_config, partial(trials.run, combination))
        if result.error is not None:
            logger.warning(f"{result.method} failed: {result.error}")
        comparison.results.append(result)
        if output is not None:
            comparison.save(output, overwrite)
    return comparison
