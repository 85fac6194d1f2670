"""Scores on tasks of the lm-evaluation-harness, which the extra `eval` installs: zero-shot accuracy, or generated answers."""

import copy
import hashlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.torch_state import inference
from ..common.validation import check_count, did_you_mean, require_extra, validate_strings
from .perplexity import check_language_model


ACCURACY = "acc"
ACCELERATOR_BATCH = 32  # answers per forward on an accelerator: fewer would leave it idle
PAPER = ("rte", "winogrande", "boolq", "hellaswag", "arc_easy", "arc_challenge", "openbookqa")


@dataclass(frozen=True)
class TaskResult:
    """Result of a model on one task.

    Args:
        score (`float`): of the metric; for `"acc"`, the share of right answers, in [0, 1].
        stderr (`float`, *optional*): its standard error; None for a single question, or a metric that is not a mean.
        samples (`int`): number of questions asked.
        metric (`str`): `"acc"`, or the first metric that the task names.
        mean_length (`float`, *optional*): tokens in a generated answer, up to the text that ends it.
        cut_off (`float`, *optional*): share of generated answers with as many tokens as the task allows, in [0, 1].
    """

    score: float
    stderr: float | None
    samples: int
    metric: str = ACCURACY
    mean_length: float | None = None
    cut_off: float | None = None


@dataclass(frozen=True)
class TaskSet:
    """Tasks with their questions, which are read once for all models that answer them."""

    tasks: dict[str, Any]  # name -> the harness's task
    limit: int | None = None  # number of first questions of each task
    files: dict[str, str] = field(default_factory=dict)  # checksums of the files that describe the user's own tasks


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str] | TaskSet,
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    include_path: str | Path | None = None,
    add_bos: bool | None = None,
    apply_chat_template: bool = False,
) -> dict[str, TaskResult]:
    """Return the score on each task of the lm-evaluation-harness.

    Multiple-choice tasks are asked without examples. The model's choice is the answer with the largest log-likelihood
    after the question, summed over its tokens in float32: the harness's `acc`, not `acc_norm`. The paper's figures for
    dense models are `acc`. All other tasks, such as gsm8k and ifeval, have their own examples and their first metric. A
    result also says how long generated answers are and how many reach the limit, as those of pruned models often do.
    Tasks that run generated code need the environment variable `HF_ALLOW_CODE_EVAL=1`.

    Args:
        model (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): a causal language model and its tokenizer.
        tasks (`Sequence[str]`): the harness's tasks, groups and tags; or `"paper"`, the paper's seven tasks. Or the result of
            [`load_tasks`], which has its own `limit` and `include_path`.
        limit (`int`): number of first questions of each task. None: all.
        batch_size (`int`): answers per forward. Changes the result by rounding at most. None: 1 on a CPU, else 32.
        include_path (`str` or `Path`): a folder of further tasks, in the harness's YAML format.
        add_bos (`bool`): True to begin every question with the BOS token. The harness does so for Gemma models in any case.
        apply_chat_template (`bool`): True to ask each question as a user's turn.

    Raises:
        `ImportError`: the extra `eval` is not installed.
        `ValueError`, `TypeError`: an unknown task, or a model that cannot be evaluated.
    """
    chosen = tasks if isinstance(tasks, TaskSet) else load_tasks(tasks, limit, include_path)
    if not chosen.tasks:
        return {}
    if batch_size is not None:
        check_count("batch_size", batch_size, 1)
    check_language_model(model)
    if model.device.type == "meta":  # the harness sends questions to the device of the embeddings
        raise ValueError("Tasks need the embeddings in memory, not offloaded: change device_map or --stream.")
    if all(getattr(tokenizer, name, None) is None for name in ("eos_token_id", "bos_token_id")):
        raise ValueError("Tasks need a tokenizer with an eos_token or a bos_token, which begins each text: set one.")
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM

    # A copy, since HFLM adds a padding token to a tokenizer without one.
    batch_size = batch_size or (1 if model.device.type == "cpu" else ACCELERATOR_BATCH)
    options = {"tokenizer": copy.deepcopy(tokenizer), "batch_size": batch_size, "softmax_dtype": "float32"}
    options |= {} if add_bos is None else {"add_bos_token": add_bos}
    with inference(model):
        head = model.get_output_embeddings()
        own = getattr(head, "weight", None)
        with _errors_only():
            wrapped = HFLM(model, backend="causal", **options)
        if own is not None and head.weight is not own:
            head.weight = own  # the harness ties weights, even a head of its own if only the config ties it
        # Unlike simple_evaluate, this seeds no generators. No bootstrap: the error of a mean has a formula.
        how = {"bootstrap_iters": 1, "log_samples": False, "apply_chat_template": apply_chat_template}
        how["confirm_run_unsafe_code"] = os.environ.get("HF_ALLOW_CODE_EVAL") == "1"
        results = evaluate(lm=wrapped, task_dict={"tasks": chosen.tasks}, limit=chosen.limit, **how)
    return {name: _result(name, task, results, wrapped) for name, task in chosen.tasks.items()}


def load_tasks(
    tasks: Sequence[str],
    limit: int | None = None,
    include_path: str | Path | None = None,
    accuracy_only: bool = False,
) -> TaskSet:
    """Return tasks with their questions. Those with `acc` are asked without examples.

    Raise for unknown tasks and, with `accuracy_only`, for those without `acc`.
    """
    names = [tasks] if isinstance(tasks, str) else validate_strings("tasks", tasks, "['boolq']")
    names = list(dict.fromkeys(task for name in names for task in (PAPER if name == "paper" else (name,))))
    if limit is not None:
        check_count("limit", limit, 1)
    if not names:
        for option, value in (("limit", limit), ("include_path", include_path)):
            if value is not None:
                raise ValueError(f"{option} is {value}, but there are no tasks: name some, or leave it out.")
        return TaskSet({})
    require_extra("lm_eval", "eval")
    from lm_eval.tasks import TaskManager

    path = include_path and str(include_path)
    manager = TaskManager(include_path=path, include_defaults=path is None)
    if path and not set(names) <= set(manager.all_tasks):  # then the harness's own tasks too, which takes many seconds
        manager = TaskManager(include_path=path)
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(f"Unknown task {name!r}.{did_you_mean(name, ['paper', *manager.all_tasks])}")
    with _errors_only():
        loaded = manager.load(names)["tasks"]
    for name, task in loaded.items():
        if ACCURACY in task.aggregation():
            task.set_config(key="num_fewshot", value=0)
        elif accuracy_only:
            raise ValueError(f"The task {name!r} has no metric {ACCURACY!r}: choose multiple-choice tasks.")
    files = sorted(Path(path).rglob("*.yaml")) if path else []
    return TaskSet(loaded, limit, {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files})


@contextmanager
def _errors_only() -> Iterator[None]:
    """Silence the harness's warnings about its own tasks, and about models that are not given by name."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _result(name: str, task: Any, results: dict, harness: Any) -> TaskResult:
    for instance in task.instances:
        # a response is (log-likelihood, True if greedy decoding gives this answer)
        if any(isinstance(response, tuple) and math.isnan(response[0]) for response in instance.resps):
            raise ValueError(f"A log-likelihood in the task {name!r} is NaN: load the model in bfloat16 or float32.")
    # Values are called "acc,none" and "acc_stderr,none", where "none" is the first filter of the answers.
    values = {key.partition(",")[0]: value for key, value in reversed(results["results"][name].items())}
    # A metric may have other names in the results: pass_at_k is there as pass@1.
    metric = ACCURACY if ACCURACY in values else next(key for key in task.aggregation() if key in values)
    score, samples = float(values[metric]), results["n-samples"][name]["effective"]
    is_mean = task.aggregation()[metric].__name__ == "mean"
    stderr = float(values[f"{metric}_stderr"]) if is_mean and values[f"{metric}_stderr"] != "N/A" else None
    lengths = [(length, length >= limit) for length, limit in _lengths(task, harness)]
    mean_length, cut_off = (sum(column) / len(lengths) for column in zip(*lengths)) if lengths else (None, None)
    return TaskResult(score, stderr, samples, metric, mean_length, cut_off)


def _lengths(task: Any, harness: Any) -> Iterator[tuple[int, int]]:
    """Yield the tokens of each generated answer, up to the text that ends it, and the limit of its tokens."""
    from lm_eval.models.utils import normalize_gen_kwargs

    for instance in task.instances:
        if instance.request_type == "generate_until":
            limit = normalize_gen_kwargs(instance.args[1], harness.max_gen_toks)["max_gen_toks"]
            for response in instance.resps:
                yield len(harness.tok_encode(response, add_special_tokens=False)), limit
