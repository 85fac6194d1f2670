"""What a fine-tune needs: the two models, the text and the number of steps, checked before it begins."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.utils.logging import is_progress_bar_enabled

from ..checkpoint.saving import check_saveable
from ..checkpoint.writing import SaveOptions
from ..common.notes import get_logger
from ..common.processes import Processes
from ..common.torch_state import multiplies_bfloat16, time_on
from ..compat import hf_private
from ..data.documents import load_documents
from ..data.token_windows import (
    TokenWindows,
    check_vocabulary,
    mix,
    resolve_bos,
    resolve_seq_length,
    text_tokenizer,
    with_bos,
)
from ..evaluation.perplexity import check_language_model, evaluate_perplexity
from ..files.records import Records, checksum, versions
from ..model.find_blocks import find_all_projections
from ..model.load_model import load_model
from ..model.origin import find_tokenizer
from ..model.sparsity import SPARSE, measure_sparsity
from ..packed.sparsify import densify
from ..pruning.prepare import identity
from .finetune_config import TOKENS, FinetuneConfig
from .sparse_trainer import Predictor, check_vocabularies, mixed_loss
from .sparse_weights import find_sparse_decoder, find_sparse_weights


logger = get_logger(__name__)

LEARNING_RATES = {True: 1.16, False: 0.29}  # of a model of width 1, by whether LoRA is trained
WARMUP = 0.05  # share of the steps
EVALUATIONS = 5  # during a fine-tune, each with a checkpoint
HELD_OUT = 16  # windows to measure on during the training
PROBED = 3  # passes that are timed before training for some minutes; the last one counts


@dataclass(frozen=True)
class Setup:
    """What a fine-tune trains, on what, and how."""

    student: PreTrainedModel
    teacher: PreTrainedModel | None
    config: FinetuneConfig
    text: TokenWindows
    records: Records
    arguments: TrainingArguments


def load_student(
    model: str | Path, config: FinetuneConfig, options: SaveOptions, model_kwargs: Mapping[str, Any]
) -> PreTrainedModel:
    """Load the sparse model, in float32 for the optimizer's small steps."""
    student = densify(load_model(model, dtype=torch.float32, **model_kwargs))
    check_language_model(student)
    resolve_seq_length(student.config, config.seq_length)
    check_saveable(student, options)
    find_sparse_weights(student)
    student.requires_grad_(True)
    if config.lora is None:  # trains as well without embeddings, in less time and memory
        student.get_input_embeddings().requires_grad_(False)
    return student


def load_teacher(
    name: str | Path,
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: FinetuneConfig,
    device: torch.device,
    model_kwargs: Mapping[str, Any],
) -> PreTrainedModel:
    """Load the dense model that the student learns from."""
    options = {key: value for key, value in model_kwargs.items() if key != "revision"}
    dtype = torch.bfloat16 if uses_bfloat16(config, device) else torch.float32
    teacher = densify(load_model(name, dtype=dtype, **options))
    expected = "expected the dense model that the sparse one was pruned from."
    if (zeros := measure_sparsity(find_all_projections(teacher)).achieved) > SPARSE:
        raise ValueError(f"{zeros:.0%} of the weights of the teacher {name} are zero: {expected}")
    check_vocabularies(student, teacher)
    theirs = find_tokenizer(name, **options)
    if theirs is not None and theirs.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"The tokenizers of the teacher {name} and the sparse model differ: {expected}")
    return teacher.to(device)


def prepare_training(
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    config: FinetuneConfig,
    datasets: Sequence[Any],
    folder: Path | None,
) -> Setup:
    """Draw the text, measure both models on some, count the steps, and check that records in the folder are of this fine-tune."""
    processes = Processes.current()
    micro_batch, accumulated = _split_batch(config, processes)
    draw = partial(
        mix_texts,
        datasets,
        tokenizer,
        seq_length=config.seq_length,
        seed=config.seed,
        vocab_size=student.get_input_embeddings().weight.shape[0],
        bos=resolve_bos(student.config, tokenizer, config.add_bos),
    )
    steps = config.steps
    if config.minutes is None:
        steps = steps or math.ceil((config.tokens or TOKENS) / (config.batch_size * config.seq_length))
    # Unusable data and models should raise before anything is recorded.
    text = draw(steps * config.batch_size if steps else 1)
    _check_losses(student, teacher, text.held_out)
    made_from = identity(find_sparse_decoder(student), torch.cat([text.held_out, text.ids]))
    made_from["training data"] = made_from.pop("calibration data")
    made_from["teacher"] = teacher and checksum(teacher)
    settings = {**config.to_dict(), **made_from, "versions": versions(), "processes": processes.count}
    records = Records(folder, settings, processes)
    if steps is None:
        of_pass = partial(seconds_of_pass, student, teacher, config, micro_batch)
        with gradient_checkpointing(student, config):
            seconds, _ = records.recorded("seconds-of-a-step", lambda: (accumulated * of_pass(), {}))
        steps = max(1, int(60 * config.minutes / seconds))
        text = draw(steps * config.batch_size)
    every, width = math.ceil(steps / EVALUATIONS), student.config.get_text_config().hidden_size
    arguments = TrainingArguments(
        Path(processes.from_first(str(folder))) / "checkpoints",
        max_steps=steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulated,
        learning_rate=config.learning_rate or LEARNING_RATES[config.lora is not None] / width,
        lr_scheduler_type="cosine",
        warmup_steps=round(WARMUP * steps),
        bf16=uses_bfloat16(config, student.device),
        use_cache=bool(getattr(student.config, "use_cache", True)),  # Trainer would set it to false in config.json
        use_cpu=student.device.type == "cpu",
        eval_strategy="steps",
        eval_steps=every,
        save_steps=every,
        metric_for_best_model="eval_loss",
        logging_nan_inf_filter=False,
        logging_steps=max(1, every // 5),
        disable_tqdm=not (is_progress_bar_enabled() and sys.stderr.isatty()),
        seed=config.seed,
        report_to="none",
    )
    return Setup(student, teacher, config, text, records, hf_private.on_one_gpu(arguments))


def _check_losses(student: PreTrainedModel, teacher: PreTrainedModel | None, held_out: torch.Tensor) -> None:
    """Raise `ValueError` unless both models have a finite loss on the held-out text."""
    for role, model in (("sparse model", student), ("teacher", teacher)):
        try:
            if model is not None:
                evaluate_perplexity(model, None, held_out, batch_size=None)
        except ValueError as error:
            raise ValueError(f"The {role} cannot be measured on held-out text: {error}") from error


def _split_batch(config: FinetuneConfig, processes: Processes) -> tuple[int, int]:
    """Return the sequences in a forward pass of a process, and its forward passes in a step."""
    micro_batch = min(config.micro_batch or config.batch_size, max(1, config.batch_size // processes.count))
    accumulated, rest = divmod(config.batch_size, micro_batch * processes.count)
    if rest:
        raise ValueError(
            f"batch_size is {config.batch_size}: expected a multiple of {micro_batch * processes.count}, a micro-batch of "
            f"{micro_batch} in each process."
        )
    return micro_batch, accumulated


def uses_bfloat16(config: FinetuneConfig, device: torch.device) -> bool:
    """Return True if a fine-tune multiplies matrices in bfloat16 on a device."""
    return multiplies_bfloat16(device) if config.bf16 is None else config.bf16


def seconds_of_pass(
    student: PreTrainedModel, teacher: PreTrainedModel | None, config: FinetuneConfig, micro_batch: int
) -> float:
    """Return the seconds of a forward and a backward, with the teacher's forward. No weight is changed."""
    device, of_student, of_teacher = student.device, Predictor(student), teacher and Predictor(teacher)
    ids = torch.zeros(micro_batch, config.seq_length, dtype=torch.int64, device=device)
    student.train()
    for _ in range(PROBED):
        start = time_on(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=uses_bfloat16(config, device)):
            loss = mixed_loss(of_student, of_teacher, student, {"input_ids": ids}, ids, config.kl_weight)
        loss.backward()
        student.zero_grad()
        seconds = time_on(device) - start
    return seconds


@contextmanager
def gradient_checkpointing(model: PreTrainedModel, config: FinetuneConfig) -> Iterator[None]:
    """Let a model compute its activations twice while the context lasts, if the config says so."""
    if not config.gradient_checkpointing:
        yield
        return
    # transformers 5.23 renamed the methods.
    what = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{what}_checkpointing_enable")()
    try:
        yield
    finally:
        getattr(model, f"{what}_checkpointing_disable")()


def mix_texts(datasets: Sequence[Any], tokenizer: Any, count: int, **how: Any) -> TokenWindows:
    """Return `count` windows of [`pack_text`], of several datasets by their shares."""
    return mix(datasets, count, HELD_OUT, lambda dataset, windows: pack_text(dataset, tokenizer, windows, **how))


def pack_text(
    dataset: Any,
    tokenizer: Any,
    count: int,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    bos: int | None = None,
) -> TokenWindows:
    """Return up to `count` windows to train on, and some to measure on.

    The documents, or conversations rendered by the chat template, come in an order that the seed decides, those of streams
    and C4 in their own. Each is followed by the tokenizer's end-of-text token. They are cut without overlap. The first
    windows are held out: 16, or a tenth if the dataset holds less than 160. With `bos`, see [`resolve_bos`], every window
    is this token and a window that is one token shorter.
    """
    documents, ids = load_documents(dataset, "train", tokenizer, streaming=True), []
    length, end = seq_length - (bos is not None), getattr(text_tokenizer(tokenizer), "eos_token_id", None)
    for text in filter(str.strip, documents.shuffled(seed)):
        ids += documents.tokenize(text, bos)
        if end not in (None, *ids[-1:]) and documents.template is None:  # chat templates and some tokenizers end texts
            ids.append(end)
        if len(ids) >= max(HELD_OUT + count, 10 * HELD_OUT) * length:
            break
    documents.note_lost_turns()
    found = len(ids) // length
    if found < 2:
        raise ValueError(
            f"The dataset ({documents.source}) holds {len(ids)} tokens: expected at least two sequences of {seq_length}. Give "
            "more text, or lower seq_length."
        )
    windows = with_bos(torch.tensor(ids[: min(found, HELD_OUT + count) * length]).view(-1, length), bos)
    check_vocabulary(windows, vocab_size)
    held_out = min(HELD_OUT, max(1, found // 10))
    if found - held_out < count:
        logger.warning(
            f"The dataset ({documents.source}) holds {found - held_out} sequences of {seq_length} tokens to train on, and "
            f"{count} are needed: they are repeated."
        )
    return TokenWindows(
        windows[held_out : held_out + count], documents.source, add_bos=bos is not None, held_out=windows[:held_out]
    )
