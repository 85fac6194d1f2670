"""`finetune`: from a saved sparse model to a saved sparse model that has learned from the dense one."""

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.utils.logging import is_progress_bar_enabled

from ..checkpoint.hub import find_checkpoint
from ..checkpoint.save_options import SaveOptions
from ..checkpoint.saving import save_pruned
from ..common.display import display_name
from ..common.notes import get_logger
from ..common.progress import announce
from ..common.torch_state import default_device, preserve_rng_state
from ..data.documents import check_texts
from ..data.known_datasets import check_datasets
from ..evaluation.perplexity import as_perplexity, digest, load_tests, measure, name_test_sets, report_tests
from ..files.output import check_output
from ..files.records import hidden_directory, remove_records, versions, work_directory
from ..model.load_model import checkpoint_dtype
from ..model.origin import find_tokenizer, public_name
from ..report import REPORT_NAME, PruningReport
from .finetune_config import FinetuneConfig
from .finetune_setup import Setup, check_extras, find_teacher, load_student, load_teacher, prepare_training
from .lora import keep_lora_sparse
from .sparse_trainer import SparseTrainer
from .sparse_weights import find_sparse_decoder, find_sparse_weights


logger = get_logger(__name__)

STATE = "trainer_state.json"  # the file that Trainer writes last into a checkpoint


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

    The weights that measure best on held-out text during the training are kept. An interrupted run resumes from its last
    checkpoint when called again. Under torchrun or `accelerate launch`, the processes share each step.

    Args:
        model (`str` or `Path`): directory or Hub id of a sparse model. A packed one is unpacked.
        output (`str` or `Path`): absent, or an empty directory; checked before the work starts, and at its end.
        config ([`FinetuneConfig`], *optional*): text, amount and learning rate. None: its defaults.
        teacher (`str` or `Path`, *optional*):
            The dense model. None: the one that the sparse model's config names. It is not needed with `kl_weight=0`.
        dataset (*optional*): text in memory instead of the config's: a list of strings or conversations, a `datasets.Dataset`.
        evaluate (`Sequence` or `dict`): test sets, to measure perplexity on before and after, as for `quantize`.
        window, max_windows (`int`, *optional*): tokens per test window, and windows of each test set, as for `quantize`.
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
        `ValueError`, `TypeError`: model, teacher, text and config do not fit together; the message says what to do.
        `FileExistsError`: something lies at `output` that may not be replaced.
    """
    config, tests, device = config or FinetuneConfig(), name_test_sets(evaluate), device or default_device()
    datasets = config.dataset if dataset is None else (dataset,)
    check_datasets(datasets, tests.values())
    check_extras(config)
    options, teacher = SaveOptions(format, save_dtype), find_teacher(teacher, model, config, model_kwargs)
    target = check_output(output, overwrite, [model, teacher, work_dir])
    check_texts(find_tokenizer(model, **model_kwargs), datasets, tests.values(), streaming=True)
    student, tokenizer = load_student(model, config, options, model_kwargs)
    report = _report_of(model, model_kwargs)
    dense = None if teacher is None else load_teacher(teacher, student, tokenizer, config, device, model_kwargs)
    with work_directory(work_dir or hidden_directory(target.path), target.path) as folder, preserve_rng_state():
        setup = prepare_training(student.to(device), dense, tokenizer, config, datasets, folder)
        sets = load_tests(tests, student, tokenizer, window, max_windows, config.add_bos)
        before, _ = setup.records.recorded(f"before-{digest(sets)}", lambda: (measure(student, sets), {}))
        training = _train(setup)
        if dataset is not None:
            training["config"]["dataset"] = None  # it was passed
        training["evaluation"] = report_tests(sets, before=before, after=measure(student, sets))
        if report is not None:
            report = replace(report, training=[*report.training, training])
        if setup.processes.rank == 0:
            options = replace(options, dtype=save_dtype or checkpoint_dtype(student))
            save_pruned(student, target, report, tokenizer, options)
            remove_records(folder)  # and the checkpoints in it
        setup.processes.from_first(None)  # the others wait
    return student, report


def _train(setup: Setup) -> dict[str, Any]:
    """Train the student in place, and return the training's entry in the report."""
    config, student, text, arguments = setup.config, setup.student, setup.text, setup.arguments
    model = student if config.lora is None else _with_lora(student, config.lora, config.seed)
    trainer = SparseTrainer(
        model,
        arguments,
        teacher=setup.teacher,
        kl_weight=config.kl_weight,
        train_dataset=_examples(text.ids),
        eval_dataset=_examples(text.held_out),
        callbacks=[_ShowPerplexity()],
    )
    trainer.remove_callback(PrinterCallback)
    last = _last_checkpoint(Path(arguments.output_dir))
    if setup.processes.rank == 0:
        announce(
            f"fine-tuning for {arguments.max_steps} steps of {config.batch_size} x {config.seq_length} tokens of {text.source}"
            + (f", toward {public_name(setup.teacher)}" if setup.teacher else "")
            + (f", from step {_step_of(last)} on" if last else "")
        )
    start = time.perf_counter()
    if config.gradient_checkpointing:
        _checkpointing(student, "enable")
    trainer.train(resume_from_checkpoint=last and str(last))
    if config.gradient_checkpointing:
        _checkpointing(student, "disable")
    seconds = time.perf_counter() - start
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # its forward without bfloat16
    if config.lora is not None:
        model.merge_and_unload().requires_grad_(True)
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
        "bf16": arguments.bf16,
        "device": student.device.type,
        "processes": setup.processes.count,
        "best_step": trainer.state.best_global_step,
        "seconds": seconds,
        "resumed": last is not None,
        "versions": versions(),
    }


class _ShowPerplexity(TrainerCallback):
    """Shows the perplexity on held-out text, next to the Trainer's bar or in a log."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and is_progress_bar_enabled():
            perplexity = as_perplexity(metrics["eval_loss"])
            text = f"step {state.global_step} of {state.max_steps}: perplexity {perplexity:.2f} on held-out text"
            tqdm.write(text, file=sys.stderr)


def _with_lora(student: PreTrainedModel, rank: int, seed: int) -> nn.Module:
    """Return the model with LoRA on its projections. PEFT's "all-linear" would also adapt routers and stacked experts."""
    from peft import LoraConfig, get_peft_model

    decoder, _ = find_sparse_decoder(student)
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


def _checkpointing(model: PreTrainedModel, verb: str) -> None:
    """Call a method of a model that transformers 5.23 renamed."""
    names = f"activation_checkpointing_{verb}", f"gradient_checkpointing_{verb}"
    getattr(model, next(name for name in names if hasattr(model, name)))()


def _examples(windows: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": window, "labels": window} for window in windows]


def _last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint, or None."""
    return max((file.parent for file in folder.glob(f"checkpoint-*/{STATE}")), key=_step_of, default=None)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _report_of(model: str | Path, model_kwargs: Mapping[str, Any]) -> PruningReport | None:
    """Return the report that was saved with a model, or None after a warning."""
    where = {key: model_kwargs[key] for key in ("revision", "token", "cache_dir") if key in model_kwargs}
    report = PruningReport.load(find_checkpoint(model, **where))
    if report is None:
        logger.warning(f"{model} has no {REPORT_NAME}, so the result has no report and no model card.")
    return report
