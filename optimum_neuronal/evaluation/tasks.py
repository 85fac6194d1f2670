"""Zero-shot accuracy on tasks of the lm-evaluation-harness, which the extra `eval` installs."""

import copy
import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.torch_state import inference
from ..common.validation import check_count, did_you_mean, validate_strings
from .perplexity import check_language_model


METRIC = "acc"
ACCELERATOR_BATCH = 32  # answers per forward on an accelerator: fewer would leave it idle
PAPER = ("rte", "winogrande", "boolq", "hellaswag", "arc_easy", "arc_challenge", "openbookqa")


@dataclass(frozen=True)
class TaskResult:
    """Result of a model on one task."""

    accuracy: float  # part of right answers, in [0, 1]
    stderr: float | None  # standard error of the accuracy; None for a single question
    samples: int  # number of questions asked


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    include_path: str | Path | None = None,
    add_bos: bool | None = None,
) -> dict[str, TaskResult]:
    """Return the zero-shot accuracy on each multiple-choice task of the lm-evaluation-harness.

    The model's choice is the answer with the largest log-likelihood after the question, summed over its tokens in
    float32: the harness's `acc`, not `acc_norm`. The paper's figures for dense models are `acc`.

    Args:
        model (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): a causal language model and its tokenizer.
        tasks (`Sequence[str]`): the harness's tasks, groups and tags; or `"paper"`, the paper's seven tasks.
        limit (`int`): number of first questions of each task. None: all.
        batch_size (`int`): answers per forward. Changes the result by rounding at most. None: 1 on a CPU, else 32.
        include_path (`str` or `Path`): a folder of further tasks, in the harness's YAML format.
        add_bos (`bool`): True to begin every question with the BOS token. The harness does so for Gemma models in any case.

    Raises:
        `ImportError`: the extra `eval` is not installed.
        `ValueError`, `TypeError`: an unknown task, one without `acc`, or a model that cannot be evaluated.
    """
    return load_tasks(tasks, limit, include_path).measure(model, tokenizer, batch_size, add_bos)


@dataclass(frozen=True)
class TaskSet:
    """Zero-shot tasks with their questions, which are read once for all models that answer them."""

    tasks: dict[str, Any]  # name -> the harness's task
    limit: int | None = None  # number of first questions of each task
    files: dict[str, str] = field(default_factory=dict)  # checksums of the files that describe the user's own tasks

    def measure(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int | None = None,
        add_bos: bool | None = None,
    ) -> dict[str, TaskResult]:
        """Return a model's accuracy on each task, see [`evaluate_tasks`]."""
        if not self.tasks:
            return {}
        if batch_size is not None:
            check_count("batch_size", batch_size, 1)
        check_language_model(model)
        if model.device.type == "meta":  # the harness sends questions to the device of the embeddings
            raise ValueError(
                "Zero-shot tasks need the embeddings in memory, not offloaded: change device_map or --stream."
            )
        if all(getattr(tokenizer, name, None) is None for name in ("eos_token_id", "bos_token_id")):
            raise ValueError(
                "Zero-shot tasks need a tokenizer with an eos_token or a bos_token, which begins each text: set one."
            )
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
            # Unlike simple_evaluate, this seeds no generators. No bootstrap: the error of acc has a formula.
            quick = {"bootstrap_iters": 0, "log_samples": False}
            results = evaluate(lm=wrapped, task_dict={"tasks": self.tasks}, limit=self.limit, **quick)
        return {name: _result(name, task, results) for name, task in self.tasks.items()}


def load_tasks(tasks: Sequence[str], limit: int | None = None, include_path: str | Path | None = None) -> TaskSet:
    """Return tasks with their questions, for zero shots. Raise for unknown tasks and tasks without `acc`."""
    names = [tasks] if isinstance(tasks, str) else validate_strings("tasks", tasks, "['boolq']")
    names = list(dict.fromkeys(task for name in names for task in (PAPER if name == "paper" else (name,))))
    if limit is not None:
        check_count("limit", limit, 1)
    if not names:
        for option, value in (("limit", limit), ("include_path", include_path)):
            if value is not None:
                raise ValueError(f"{option} is {value}, but there are no tasks: name some, or leave it out.")
        return TaskSet({})
    path = include_path and str(include_path)
    manager = _task_manager(include_path=path, include_defaults=path is None)
    if path and not set(names) <= set(manager.all_tasks):  # then the harness's own tasks too, which takes many seconds
        manager = _task_manager(include_path=path)
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(f"Unknown task {name!r}.{did_you_mean(name, ['paper', *manager.all_tasks])}")
    with _errors_only():
        loaded = manager.load(names)["tasks"]
    for name, task in loaded.items():
        if METRIC not in task.aggregation():
            raise ValueError(f"The task {name!r} has no metric {METRIC!r}: choose multiple-choice tasks.")
        task.set_config(key="num_fewshot", value=0)
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


def _task_manager(**options: Any) -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError(f"Zero-shot tasks need lm-eval ({error}): pip install 'optimum-neuronal[eval]'") from error
    return TaskManager(**options)


def _result(name: str, task: Any, results: dict) -> TaskResult:
    for instance in task.instances:
        # a response is (log-likelihood, True if greedy decoding gives this answer)
        if any(isinstance(response, tuple) and math.isnan(response[0]) for response in instance.resps):
            raise ValueError(f"A log-likelihood in the task {name!r} is NaN: load the model in bfloat16 or float32.")
    # Metrics are called "acc,none", where "none" is the filter of the answers.
    metrics = {key.partition(",")[0]: value for key, value in results["results"][name].items()}
    accuracy, samples = float(metrics[METRIC]), results["n-samples"][name]["effective"]
    stderr = math.sqrt(accuracy * (1 - accuracy) / (samples - 1)) if samples > 1 else None
    return TaskResult(accuracy, stderr, samples)
