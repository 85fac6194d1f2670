"""Saves models dense or packed, whole or not at all, and pruned ones with their report and model card."""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.display import escaped
from ..common.notes import get_logger
from ..common.validation import check_choice
from ..compat import hf_private
from ..files.atomic import finish_moves, replaced_directory
from ..files.directories import check_writable, is_same, leads_out
from ..model.sparsity_config import KEY, is_own
from ..packed.packed_module import packed_modules
from ..packed.packed_weight import DTYPES
from ..report import REPORT_NAME, PruningReport
from .card import make_card, may_write_card
from .names import (
    ADAPTER_CONFIG,
    CHAT_TEMPLATE,
    CONFIG,
    FORMATS,
    MODEL_CARD,
    MODEL_FILES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
)
from .packed_files import read_json
from .writing import SHARD_SIZE, check_writable_model, write_model


logger = get_logger(__name__)

# A processor's files. Its tokenizer is saved separately.
PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json",
    "chat_template.json",
)  # fmt: skip


def save_pretrained(
    model: PreTrainedModel,
    save_directory: str | Path,
    format: str = "dense",
    max_shard_size: int | str = SHARD_SIZE,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Save a model dense, as transformers does, or packed. A save that fails leaves the directory as it was.

    ```python
    model = AutoModelForCausalLM.from_pretrained("llama-70")
    save_pretrained(model, "llama-70-packed", format="packed")
    ```

    Args:
        model (`PreTrainedModel`): a sparse model, in memory or offloaded; from `torch.compile`, the model inside is saved.
        save_directory (`str` or `Path`): created if missing; weights of another save are removed from it.
        format (`str`):
            `"dense"`: ordinary safetensors with zeros. `"packed"`: bitmasks and nonzero values; all packed weights are in
            memory while they are written.
        max_shard_size (`int` or `str`): bytes of a file, or text such as `"500MB"`.
        dtype (`torch.dtype`, *optional*): of the files; the model itself keeps its own. None: the model's.

    Raises:
        `TypeError`: this is not a transformers model, or not a floating-point dtype.
        `ValueError`: the format is unknown or does not support the dtype, or the model has adapters.
        `OSError`: the directory cannot be written, or the disk is full.
    """
    check_saveable(model, format, dtype)
    with replaced_checkpoint(check_writable(save_directory, "save to")) as staging:
        write_model(model, staging, format, max_shard_size, dtype)


@contextmanager
def replaced_checkpoint(path: Path, old: Iterable[str] = MODEL_FILES) -> Iterator[Path]:
    """Yield the temporary folder of [`replaced_directory`], and raise failures there as one `OSError`."""
    if (path / ADAPTER_CONFIG).exists():
        warn_of_adapter(path)
    try:
        with replaced_directory(path, old, last=CONFIG) as staging:
            yield staging
    except FileExistsError:  # its message says what is in the way
        raise
    except (OSError, SafetensorError) as error:
        if os.strerror(errno.ENOSPC) in str(error):
            raise OSError(
                f"The disk of {path} is full, and its files are unchanged. New files need space next to the old ones: free up "
                "some, and save again."
            ) from error
        raise OSError(f"Saving to {path} failed, and its files are unchanged: {error}") from error


def save_pruned(
    model: PreTrainedModel,
    directory: str | Path,
    report: PruningReport | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    format: str | None = None,
    title: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Save model, tokenizer, report and, with a report, the model card. A save that fails leaves the directory as it was.

    A process that is killed leaves the old checkpoint, the new one or, while files are moved, no config.json. The next save
    or command with this directory then completes the save. Other files stay, and so does a README.md of your own. The
    card's title is the directory's name unless you pass one.
    """
    model = hf_private.uncompiled(model)
    format = check_saveable(model, format, dtype)
    path = check_writable(directory, "save to")
    title, with_card = title or path.name, may_write_card(path)
    with replaced_checkpoint(path, old_files(path, tokenizer is not None)) as staging:
        write_model(model, staging, format, SHARD_SIZE, dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        copy_processor(model, staging)
        if report is None:
            return
        report.save(staging)
        if with_card:
            (staging / MODEL_CARD).write_text(
                make_card(model, report, title, format, tokenizer is not None, has_chat_template(staging), dtype),
                encoding="utf-8",
            )
        else:
            logger.warning(f"{MODEL_CARD} of {title} was not written by optimum_neuronal, so it is not replaced.")


def warn_of_adapter(place: str | Path) -> None:
    """Warn of an adapter in a directory or repository that a model is saved to."""
    logger.warning(
        f"{place} holds an adapter, which transformers will load with the model: remove {ADAPTER_CONFIG} if it is merged."
    )


def old_files(directory: Path, with_tokenizer: bool) -> list[str]:
    """Return patterns of the files of an old model, and tokenizer, which another model in the directory must not meet."""
    card = (MODEL_CARD,) if may_write_card(directory) else ()
    return [*MODEL_FILES, REPORT_NAME, *card, *(TOKENIZER_FILES if with_tokenizer else ())]


def has_chat_template(folder: Path) -> bool:
    """Return True if the tokenizer in a folder has a chat template."""
    if (folder / CHAT_TEMPLATE).exists():
        return True
    with suppress(OSError, ValueError):
        return bool(read_json(folder / TOKENIZER_CONFIG).get("chat_template"))
    return False


def copy_processor(model: PreTrainedModel, folder: Path) -> None:
    """Copy the processor's files of the checkpoint that a multimodal model was loaded from, unless they are there."""
    config = model.config
    if config.get_text_config(decoder=True) is config or not config.name_or_path:
        return
    for name in PROCESSOR_FILES:
        try:
            path = hf_private.find_file(model, name)
            if path is not None and not (folder / name).exists() and not leads_out(path, path.parent):
                shutil.copyfile(path, folder / name)
        except (OSError, ValueError) as error:
            logger.warning(f"{name} could not be copied from {config.name_or_path!r}: {error}")


def check_saveable(model: PreTrainedModel, format: str | None, dtype: torch.dtype | None = None) -> str:
    """Return the format to save a model in, by default packed if it computes with packed weights.

    Raise for a model, format or dtype that could not be saved.
    """
    if format is None:
        format = "packed" if next(packed_modules(model), None) else "dense"
    check_choice("format", format, FORMATS)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"The dtype to save in is {dtype!r}: expected a floating-point one, such as torch.bfloat16.")
    if format == "packed" and dtype not in (None, *DTYPES):
        raise ValueError(f"The packed format does not support {dtype}: expected one of {', '.join(map(str, DTYPES))}.")
    check_writable_model(hf_private.uncompiled(model))
    return format


def check_model_directory(directory: str | Path, overwrite: bool = False, source: str | Path | None = None) -> Path:
    """Return the absolute path of a directory that a command may write a checkpoint to; never the dense `source`."""
    path = check_writable(directory, "save to")
    check_other_directory(source, path)
    finish_moves(path)
    if replaced := _pruned_as(path):
        logger.warning(f"{directory} holds a pruned model, which will be replaced: {replaced}.")
    elif not overwrite and path.is_dir() and any(path.iterdir()):
        raise FileExistsError(
            f"{directory} is not empty, and does not hold a pruned model. Choose another directory, or pass --overwrite "
            "to replace the model in it. Other files stay."
        )
    return path


def check_other_directory(source: str | Path | None, output: str | Path) -> None:
    """Raise `FileExistsError` if a model would be saved over the files that it was read from."""
    if source and os.path.isdir(source) and is_same(source, output):
        raise FileExistsError(f"The pruned model would replace the model in {output}. Choose another directory.")


def check_replaceable(directory: str | Path, overwrite: bool) -> None:
    """Raise `FileExistsError` if a directory holds a dense model, unless it may be replaced."""
    if not overwrite and (Path(directory) / CONFIG).exists() and not _pruned_as(Path(directory)):
        raise FileExistsError(
            f"{directory} holds a model that is not pruned. Choose another directory, or pass overwrite=True to replace it."
        )


def _pruned_as(directory: Path) -> str | None:
    """Return how the model in a directory was pruned, such as `"wanda + uniform, sparsity 0.6"`; None without one."""
    with suppress(OSError, ValueError):
        about = read_json(directory / CONFIG).get(KEY)
        if is_own(about):
            return escaped(f"{about.get('method')}, sparsity {about.get('sparsity')}", 200)
    return None
