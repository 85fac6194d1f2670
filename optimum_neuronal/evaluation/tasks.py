"""Zero-shot accuracy on tasks of the lm-evaluation-harness, which the extra `eval` installs."""

import copy
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..blocks.block_inputs import inference
from ..common.validation import check_count, check_path, check_texts, names_closest_keyword
from ..data.hub_datasets import connection_error, offline_mode
from ..pruning.calibrating import check_tokenizer
from .evaluated_model import check_language_model
from .task_names import GROUPS, check_task_names, missing_harness, stock_names, unknown_task


if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

METRIC = "acc"
ANY_DATASET = "nyu-mll/glue"  # asked for to learn if there is a connection


@dataclass(frozen=True)
class TaskResult:
    """Result of a model on one task.

    Args:
        accuracy (`float`): share of questions whose most likely answer is right, in [0, 1].
        stderr (`float`, *optional*): standard error of `accuracy`; None for a single question.
        metric (`str`): the harness's name of `accuracy`.
        samples (`int`): number of questions.
    """

    accuracy: float
    stderr: float | None
    metric: str
    samples: int


@names_closest_keyword
def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int = 1,
    include_path: str | Path | None = None,
) -> dict[str, TaskResult]:
    """Return the zero-shot accuracy on multiple-choice tasks of the lm-evaluation-harness.

    The model's choice is the answer with the largest log-likelihood after the question, summed over its tokens: the
    harness's `acc`, not `acc_norm`, which divides by the answer's length. The paper says only "accuracy", but its figures
    for dense models are `acc`. Log-likelihoods are summed in float32; the harness's own command line sums in the model's
    dtype, which makes ties commoner.

    Args:
        model (`PreTrainedModel`): a causal language model. It computes on its device and in its dtype, in evaluation
            mode; afterwards every module has its former mode.
        tokenizer (`PreTrainedTokenizerBase`): of the model; it is not changed.
        tasks (`Sequence[str]`): names of the harness's tasks; of its groups and tags, which stand for their tasks; or
            `"paper"`, the seven of the paper: rte, winogrande, boolq, hellaswag, arc_easy, arc_challenge, openbookqa.
        limit (`int`): number of first questions of each task. None: all of them.
        batch_size (`int`): answers per forward. The result does not depend on it, except for rounding.
        include_path (`str` or `Path`): a folder of further tasks, in the harness's YAML format; they take precedence.

    Returns:
        `dict`: task -> [`TaskResult`], in the order asked for.

    Raises:
        `ImportError`: the extra `eval` is not installed.
        `ValueError`: an unknown task, or one without `acc`; a model without a language-model head or with weights on
            the meta device; a log-likelihood that is NaN.
        `TypeError`: no model, no tokenizer, or a count that is no whole number.
        `OSError`: a task's data cannot be downloaded. Like an unknown task, this is found before the model runs.
    """
    check_count("batch_size", batch_size, 1)
    _check_options(limit, include_path)
    _check_tokenizer(tokenizer)
    check_language_model(model, "which tasks need")
    loaded = _load_tasks(_expand(tasks), include_path)
    with inference(model):
        results = _run(model, tokenizer, loaded, limit, batch_size)
    return {name: _result(name, task, results) for name, task in loaded["tasks"].items()}


def check_tasks(tasks: Sequence[str], include_path: str | Path | None = None, limit: int | None = None) -> None:
    """Raise the errors of [`evaluate_tasks`] for these arguments, unknown tasks and tasks without data included."""
    _check_options(limit, include_path)
    _load_tasks(_expand(tasks), include_path)


def _check_options(limit: int | None, include_path: str | Path | None) -> None:
    if limit is not None:
        check_count("limit", limit, 1)
    if include_path is not None and not Path(check_path("include_path", include_path)).is_dir():
        raise ValueError(f"include_path={str(include_path)!r} is not a folder of task files.")


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is None or isinstance(tokenizer, str):
        raise ValueError(
            "Zero-shot tasks are text and need a tokenizer: pass what AutoTokenizer.from_pretrained returns."
        )
    check_tokenizer(tokenizer)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no bos_token and no eos_token; the harness needs one: set it.")


def _expand(tasks: Sequence[str]) -> list[str]:
    """Return the names of tasks, each once, with this package's own groups resolved."""
    names = [tasks] if isinstance(tasks, str) and tasks else check_texts("tasks", tasks, "['boolq']")
    if not names:
        raise ValueError('tasks is empty: name at least one, for instance "paper".')
    return list(dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,))))


def _load_tasks(names: list[str], include_path: str | Path | None) -> dict:
    """Return the harness's dict of tasks and groups, with their data, for zero shots."""
    check_task_names(names, include_path)
    with _quiet():
        manager, found = _find(names, include_path)
        no_connection = connection_error(ANY_DATASET)
        parts: list[Any] = []
        with offline_mode(no_connection is not None):
            for name in names:
                try:
                    part = manager.load([found[name]])
                except (OSError, ValueError) as error:
                    raise _unreadable(name, error, no_connection) from error
                parts += [part["groups"][name]] if name in part["groups"] else part["tasks"].values()
        loaded = manager.load(parts)
    for name, task in loaded["tasks"].items():
        if METRIC not in task.aggregation():
            raise ValueError(
                f"The task {name!r} has no metric {METRIC!r} but {', '.join(task.aggregation())}: only multiple-choice "
                "tasks have an accuracy."
            )
        task.set_config(key="num_fewshot", value=0)
    return loaded


def _unreadable(name: str, error: Exception, no_connection: Exception | None) -> OSError:
    """Return the error for a task without data."""
    reason = str(error).rstrip(".")
    if no_connection is None:
        return OSError(f"The data of the task {name!r} cannot be read: {reason}.")
    return OSError(
        f"The data of the task {name!r} is not in the cache ({reason}), and there is no connection to the Hub "
        f"({no_connection}): run it once with one, or name tasks of your own files, by include_path (--include-path)."
    )


def _find(names: list[str], include_path: str | Path | None) -> tuple["TaskManager", dict[str, str]]:
    """Return an index of tasks, and for each name what to load from it: itself, or the path of its file.

    All of the harness's files take half a minute to index: that waits until a group or a tag is named.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise missing_harness(error) from error
    path = None if include_path is None else str(include_path)
    manager, files = TaskManager(include_path=path, include_defaults=False), stock_names()
    found = {name: name if name in manager.all_subtasks else files.get(name) or "" for name in names}
    if all(found.values()):
        return manager, found
    manager = _stock_tasks() if path is None else TaskManager(include_path=path)
    for name in names:
        if name not in manager.all_tasks:
            raise unknown_task(name, manager.all_tasks)
    return manager, {name: name for name in names}


@functools.lru_cache
def _stock_tasks() -> "TaskManager":
    """Return the index of the harness's own tasks, made once for all models."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, loaded: dict, limit: int | None, batch_size: int
) -> dict:
    """Return the harness's results: for every task its metrics and number of questions."""
    try:
        from lm_eval import evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:  # the harness is installed, but not the packages of its models
        raise missing_harness(error) from error
    with _quiet():
        # A copy, since HFLM adds a padding token to a tokenizer without one.
        wrapped = HFLM(
            pretrained=model,
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),
            batch_size=batch_size,
            softmax_dtype="float32",
        )
    if wrapped.device.type == "meta":  # Offloaded; accelerate's hooks bring the ids to the right device.
        wrapped._device = type(wrapped.device)("cpu")
    # simple_evaluate would seed every generator of the process, run programs to describe the machine, and return nothing
    # in all but the first of several processes. No bootstrap: acc's error has a formula.
    return evaluate(lm=wrapped, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=False)


def _result(name: str, task: Any, results: dict) -> TaskResult:
    for instance in task.instances:
        # a response is (log-likelihood, True if greedy decoding gives this answer)
        if any(isinstance(response, tuple) and math.isnan(response[0]) for response in instance.resps):
            raise ValueError(
                f"A log-likelihood is nan in question {instance.doc_id} of the task {name!r}: the model's weights or "
                "activations hold NaN or inf, or its dtype overflows (try bfloat16 or float32)."
            )
    # Metrics are called "acc,none", where "none" is the filter of the answers.
    metrics = {key.partition(",")[0]: value for key, value in results["results"][name].items()}
    accuracy, samples = float(metrics[METRIC]), results["n-samples"][name]["effective"]
    stderr = math.sqrt(accuracy * (1 - accuracy) / (samples - 1)) if samples > 1 else None
    return TaskResult(accuracy, stderr, METRIC, samples)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness's warnings about a model in memory and metrics with default settings."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
