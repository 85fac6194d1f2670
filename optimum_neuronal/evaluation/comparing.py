"""`compare`: every combination of saliency, top-up and sparsity on one model that is loaded once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..checkpoint.origin import public_name
from ..config import NeuronALConfig
from ..config_aliases import as_json
from ..data.documents import check_dataset
from ..pruning.exclusive import alone_with
from ..pruning.reporting import versions
from ..runtime.arguments import check_several, check_texts
from ..runtime.notes import get_logger
from ..runtime.processes import Processes
from ..runtime.registry import parse_method
from ..saliency import SALIENCIES
from ..topup import TOPUPS
from .comparison import Comparison
from .loading import as_model
from .result_records import ResultRecords
from .results import DENSE
from .tasks import check_tasks
from .test_sets import name_test_sets
from .trials import Trials, make_configs


logger = get_logger(__name__)

DEFAULTS: dict[str, Any] = {
    "saliencies": ("wanda",),
    "topups": ("uniform", "neuronal", "search"),
    "sparsities": (0.6, 0.7, 0.8),
}


def compare(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    saliencies: Sequence[str] = DEFAULTS["saliencies"],
    topups: Sequence[str] = DEFAULTS["topups"],
    sparsities: Sequence[float] = DEFAULTS["sparsities"],
    dataset="c4",
    evaluate: Sequence = ("wikitext2",),
    tasks: Sequence[str] = (),
    limit: int | None = None,
    include_path: str | Path | None = None,
    max_windows: int | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    **config,
) -> Comparison:
    """Prunes a model in many ways and measures what each loses. The model is as before afterwards.

    What the dense model does is measured once for all. A combination that fails is a result with its error.

    Args:
        model (`PreTrainedModel`, `str` or `Path`): a dense decoder model with its weights in memory, or where to load it from.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the one of the model's own checkpoint.
        saliencies, topups (`Sequence[str]`): methods, with hyper-parameters if wanted: `"owl:half_width=0.1"`.
        sparsities (`Sequence[float]`): each in [0, 1).
        dataset: calibration data, as for [`NeuronALPruner.prune`].
        evaluate (`Sequence` or `dict`): test sets, each as for [`evaluate_perplexity`]; or name -> test set.
        tasks, limit, include_path: zero-shot tasks, as for [`evaluate_tasks`].
        max_windows (`int`, *optional*): windows per test set.
        output (`str` or `Path`, *optional*): directory for tables and for results, from which a later call goes on.
        overwrite (`bool`): whether to run again what is finished there.
        config: further fields of [`NeuronALConfig`] for all combinations: `num_samples`, `seq_length`, ...

    Raises:
        `ValueError`, `TypeError`: unknown methods, or a model and data that no combination can work with.
        `RuntimeError`: another thread prunes the model.
    """
    if Processes.current().count > 1:
        raise ValueError("compare runs in one process; start it without torchrun or accelerate launch.")
    saliencies = check_texts("saliencies", saliencies, "['wanda']")
    topups = check_texts("topups", topups, "['search']")
    sparsities, config = check_several("sparsities", sparsities, "[0.6, 0.7]"), as_json(config)
    evaluate, tasks = name_test_sets(evaluate), check_texts("tasks", tasks, "['boolq']")
    asked = check_asked(saliencies, topups, sparsities, dataset, evaluate, config)
    if tasks:
        check_tasks(tasks, include_path)
    model, tokenizer = as_model(model, tokenizer)
    trials = Trials(model, tokenizer, dataset, config, asked)
    trials.load_tests(evaluate, max_windows)
    trials.load_tasks(tasks, limit, include_path)
    with alone_with(model):
        return _run(trials, ResultRecords(output, overwrite, trials.identity), asked, output)


def _run(trials: "Trials", records: "ResultRecords", asked: Sequence[tuple], output: str | Path | None) -> Comparison:
    calibration = trials.calibration.to_dict() if trials.calibration is not None else {}
    name = public_name(trials.model)
    dense = records.get_or_make((0.0, DENSE, DENSE), {}, trials.dense)
    comparison = Comparison(name, dense, [], calibration, versions())
    for combination in logging.tqdm(asked, desc="Comparing", unit="combination"):
        config = trials.configs[combination]
        fields_of_config = config if isinstance(config, str) else config.to_dict()
        result = records.get_or_make(combination, fields_of_config, lambda c=combination: trials.run(*c))
        if result.error is not None:
            logger.warning(f"{result.saliency} + {result.topup} at {result.sparsity:.0%} failed: {result.error}")
        comparison.results.append(result)
        if output is not None:
            comparison.save(output)
    return comparison


def check_asked(
    saliencies: Sequence[str],
    topups: Sequence[str],
    sparsities: Sequence[float],
    dataset,
    evaluate: Sequence,
    config: dict[str, Any],
) -> list[tuple[float, str, str]]:
    """The combinations that [`compare`] is asked for, if none is wrong in what can be known without a model.

    Arguments and errors are those of [`compare`]; `config` holds the further fields of [`NeuronALConfig`].
    """
    for registry, methods in ((SALIENCIES, saliencies), (TOPUPS, topups)):
        for method in methods:
            registry.get(parse_method(method)[0])
    asked = [(s, saliency, topup) for s in sparsities for saliency in saliencies for topup in topups]
    if not asked:
        raise ValueError("There is nothing to compare: name at least one saliency, one top-up and one sparsity.")
    configs = [found for found in make_configs(asked, dataset, config).values() if isinstance(found, NeuronALConfig)]
    if isinstance(dataset, str) and any(found.make_methods().needs_calibration for found in configs):
        check_dataset(dataset)
    for test in name_test_sets(evaluate).values():
        if isinstance(test, str):
            check_dataset(test, "test")
    return asked
