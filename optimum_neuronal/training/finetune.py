"""`finetune`: from a saved sparse model to a saved sparse model that has learned from the dense one."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PrinterCallback

from ..checkpoint.hub import find_checkpoint
from ..checkpoint.saving import save_pruned
from ..checkpoint.writing import SaveOptions
from ..common.display import display_name
from ..common.notes import announce, get_logger
from ..common.torch_state import default_device, preserve_rng_state
from ..common.validation import require_extra
from ..compat import hf_private
from ..data.documents import check_texts
from ..evaluation.answers import DenseAnswers
from ..evaluation.perplexity import as_perplexity, digest, load_tests, measure, name_test_sets, report_tests
from ..files.output import check_output
from ..files.records import hidden_directory, remove_records, versions, work_directory
from ..model.load_model import checkpoint_dtype
from ..model.origin import find_tokenizer, public_name, read_base_model
from ..report import REPORT_NAME, PruningReport, answers_text, before_and_after
from .checkpoints import Checkpoints
from .finetune_config import FinetuneConfig
from .finetune_setup import Setup, gradient_checkpointing, load_student, load_teacher, prepare_training
from .lora import keep_lora_sparse
from .sparse_trainer import SparseTrainer
from .sparse_weights import find_sparse_decoder, find_sparse_weights


logger = get_logger(__name__)


def finetune(
    model: str | Path,
    output: str | Path,
    config: FinetuneConfig | None = None,
    *,
    teacher: str | Path | None = None,
    dataset: Any = None,
    evaluate: Iterable[Any] | Mapping[str, Any] = (),
    window: int | None = None,
    max_windows: int | None = None,
    answers: bool | Sequence[Any] = False,
    format: str = "dense",
    save_dtype: torch.dtype | None = None,
    work_dir: str | Path | None = None,
    overwrite: bool = False,
    device: torch.device | None = None,
    **model_kwargs: Any,
) -> tuple[PreTrainedModel, PruningReport | None]:
    """Train a saved sparse model, by default toward the predictions of its dense model, and save it. Every zero stays.

    ```python
    model, report = finetune("llama-50", "llama-50-tuned", FinetuneConfig(minutes=10), evaluate=["wikitext2"])
    ```

    The weights that measure best on held-out text during the training are kept; nothing is saved if none measure better
    than those before it. An interrupted run resumes from its last checkpoint when called again. The processes of a
    `torch.distributed` group share each step.

    Args:
        model (`str` or `Path`): directory or Hub id of a sparse model. A packed one is unpacked.
        output (`str` or `Path`): absent, or an empty directory; checked before the work starts, and at its end.
        config ([`FinetuneConfig`], *optional*): text, amount and learning rate. None: its defaults.
        teacher (`str` or `Path`, *optional*):
            The dense model. None: the one that the sparse model's config names. It is not needed with `kl_weight=0`.
        dataset (*optional*): text in memory instead of the config's: a list of strings or conversations, a `datasets.Dataset`.
        evaluate (`Sequence` or `dict`): test sets, to measure perplexity on before and after, as for `quantize`.
        window, max_windows (`int`, *optional*): tokens per test window, and windows of each test set, as for `quantize`.
        answers (`bool` or `Sequence`): True, or prompts: compare the answers before and after, see [`compare_answers`].
        format (`str`): `"dense"` or `"packed"`.
        save_dtype (`torch.dtype`, *optional*): to save in. None: the dtype of the sparse model's checkpoint.
        work_dir (`str` or `Path`, *optional*): for checkpoints; removed at the end. None: hidden, next to the output.
        overwrite (`bool`): True to replace a directory that holds a model, with all that is in it.
        device (`torch.device`, *optional*): the CPU, or the accelerator. None: the accelerator if there is one.
        model_kwargs: for `from_pretrained`: `revision`, `trust_remote_code`, `token`, ... The teacher gets them without
            `revision`.

    Returns:
        The model in float32, and its report with the training added; None if the sparse model has no report.

    Raises:
        `ValueError`, `TypeError`: model, teacher, text and config do not fit together, a model's loss is not finite, or the
            training did not improve the model; the message says what to do.
        `FileExistsError`: something lies at `output` that may not be replaced.
    """
    config, tests, device = config or FinetuneConfig(), name_test_sets(evaluate), device or default_device()
    datasets = config.dataset if dataset is None else (dataset,)
    require_extra("accelerate", "train")
    if config.lora is not None:
        require_extra("peft", "peft")
    options = SaveOptions(format, save_dtype)
    teacher = (teacher or read_base_model(model, model_kwargs)) if config.kl_weight else None
    if answers and teacher is None:
        raise ValueError("Answers need a teacher, and there is none: raise kl_weight, or leave them out.")
    target = check_output(output, overwrite, [model, teacher, work_dir])
    tokenizer = find_tokenizer(model, **model_kwargs)
    if tokenizer is None:
        raise ValueError(f"No tokenizer can be loaded from {model}, and training needs one: save it with the model.")
    check_texts(tokenizer, datasets, tests.values(), streaming=True)
    student = load_student(model, config, options, model_kwargs)
    report = _report_of(model, model_kwargs)
    dense = None if teacher is None else load_teacher(teacher, student, tokenizer, config, device, model_kwargs)
    with work_directory(work_dir or hidden_directory(target.path), target.path) as folder, preserve_rng_state():
        setup = prepare_training(student.to(device), dense, tokenizer, config, datasets, folder)
        sets = load_tests(tests, student, tokenizer, window, max_windows, config.add_bos)
        before, _ = setup.records.recorded(f"before-{digest(sets)}", lambda: (measure(student, sets), {}))
        asked = answers and DenseAnswers(dense, tokenizer, None if answers is True else answers)
        compared = [asdict(asked.compare(student))] if asked else []
        training = _train(setup)
        if dataset is not None:
            training["config"]["dataset"] = None  # it was passed
        training["evaluation"] = report_tests(sets, before=before, after=measure(student, sets))
        compared += [asdict(asked.compare(student))] if asked else []
        training["answers"] = dict(zip(("before", "after"), compared))
        if report is not None:
            report = replace(report, training=[*report.training, training])
        if setup.records.processes.rank == 0:
            for name, values in training["evaluation"].items() if report is None else ():
                announce(f"perplexity, {name}: {before_and_after(values)}")
            for when, values in training["answers"].items() if report is None else ():
                announce(f"dense model's answers: {answers_text(values)} ({when})")
            options = replace(options, dtype=save_dtype or checkpoint_dtype(student))
            save_pruned(student, target, report, tokenizer, options)
            remove_records(folder)  # and the checkpoints in it
        setup.records.processes.from_first(None)  # the others wait
    return student, report


def _train(setup: Setup) -> dict[str, Any]:
    """Train the student in place, load the weights that measured best, and return the training's entry in the report."""
    config, student, text, arguments = setup.config, setup.student, setup.text, setup.arguments
    model = student if config.lora is None else _with_lora(student, config.lora, config.seed)
    checkpoints = Checkpoints(Path(arguments.output_dir), setup.records.processes)
    trainer = SparseTrainer(
        model,
        arguments,
        teacher=setup.teacher,
        kl_weight=config.kl_weight,
        train_dataset=_examples(text.ids),
        eval_dataset=_examples(text.held_out),
        callbacks=[checkpoints],
    )
    trainer.remove_callback(PrinterCallback)
    last = checkpoints.find_last()
    arguments.eval_on_start = last is None
    if setup.records.processes.rank == 0:
        announce(
            f"fine-tuning for {arguments.max_steps} steps of {config.batch_size} x {config.seq_length} tokens of {text.source}"
            + (f", toward {public_name(setup.teacher)}" if setup.teacher else "")
            + (f", from step {last.global_step} on" if last else "")
        )
    start, finished = time.perf_counter(), last is not None and last.global_step == arguments.max_steps
    if not finished:
        with gradient_checkpointing(student, config):
            trainer.train(resume_from_checkpoint=last and str(checkpoints.path(last.global_step)))
    state = last if finished else trainer.state
    before, after = map(as_perplexity, (state.log_history[0]["eval_loss"], state.best_metric))
    if not state.best_global_step:
        remove_records(setup.records.directory)  # so that another learning rate can be tried
        raise ValueError(
            f"Training did not improve the perplexity on held-out text, {before:.2f}, so nothing was saved. Choose a smaller "
            "learning rate, or more text."
        )
    hf_private.load_weights(trainer, checkpoints.path(state.best_global_step))
    seconds = time.perf_counter() - start
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # its forward without bfloat16
    if config.lora is not None:
        model.merge_and_unload()
    student.requires_grad_(True)
    find_sparse_weights(student.eval())  # raises if a zero was lost
    return {
        "config": {**config.to_dict(), "dataset": [*map(display_name, config.dataset)]},
        "teacher": None if setup.teacher is None else public_name(setup.teacher),
        "source": text.source,
        "dataset_tokens": text.dataset_tokens,
        "sha256": text.sha256,
        "steps": arguments.max_steps,
        "tokens": arguments.max_steps * config.batch_size * config.seq_length,
        "learning_rate": arguments.learning_rate,
        "frozen": "embeddings" if config.lora is None else None,
        "bf16": arguments.bf16,
        "device": student.device.type,
        "processes": setup.records.processes.count,
        "best_step": state.best_global_step,
        "held_out": {"before": before, "after": after},
        "seconds": seconds,
        "resumed": last is not None,
        "versions": versions(),
    }


def _with_lora(student: PreTrainedModel, rank: int, seed: int) -> nn.Module:
    """Return the model with LoRA on its projections. PEFT's "all-linear" would also adapt routers and stacked experts."""
    from peft import LoraConfig, get_peft_model

    decoder = find_sparse_decoder(student)
    projections = [projection for block in decoder.blocks for projection in block.projections.values()]
    linear = [projection.name for projection in projections if projection.expert is None]
    if len(linear) < len(projections):
        logger.warning("LoRA trains linear layers only, so the experts of this model are not trained.")
    torch.manual_seed(seed)
    options = {"r": rank, "lora_alpha": 2 * rank}
    adapted = get_peft_model(student, LoraConfig(**options, target_modules=linear))
    used = adapted.peft_config["default"]
    if used.target_parameters:  # PEFT takes layers with the names that experts had in transformers 4 for experts
        logger.warning(
            f"PEFT adapts only layers called {', '.join(sorted({name.rpartition('.')[2] for name in used.target_modules}))} "
            "in this family, so other projections are not trained."
        )
        adapted = get_peft_model(adapted.unload(), LoraConfig(**options, target_modules=used.target_modules))
    return keep_lora_sparse(adapted)


def _examples(windows: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": window, "labels": window} for window in windows]


def _report_of(model: str | Path, model_kwargs: Mapping[str, Any]) -> PruningReport | None:
    """Return the report that was saved with a model, or None after a warning."""
    where = {key: model_kwargs[key] for key in ("revision", "token", "cache_dir") if key in model_kwargs}
    report = PruningReport.load(find_checkpoint(model, **where))
    if report is None:
        logger.warning(f"{model} has no {REPORT_NAME}, so the result has no report and no model card.")
    return report
