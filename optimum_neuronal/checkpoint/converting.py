"""Converts a dense checkpoint to a packed one and back, with the same weights bit for bit."""

import itertools
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ..common.notes import get_logger
from ..common.validation import check_choice
from ..files.atomic import finish_moves
from ..files.directories import check_writable, is_same, leads_out
from ..model.load_model import load_model
from ..model.sparsity_config import read_sparsity_config
from ..packed.packed_weight import PREFIX
from ..report import REPORT_NAME, PruningReport
from .card import MARK, make_card, may_write_card
from .hub import find_checkpoint
from .names import (
    ADAPTER_CONFIG,
    CONFIG,
    FORMATS,
    MODEL_CARD,
    MODEL_FILES,
    WEIGHT_SUFFIXES,
)
from .packed_files import float_tensors, is_packed, read_json, weight_files
from .saving import check_replaceable, check_saveable, has_chat_template, old_files, replaced_checkpoint
from .writing import SHARD_SIZE, write_model


logger = get_logger(__name__)


def convert_checkpoint(
    directory_or_id: str | Path,
    format: str,
    output: str | Path | None = None,
    max_shard_size: int | str = SHARD_SIZE,
    *,
    revision: str | None = None,
    token: str | None = None,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write a pruned checkpoint in the other format, with the same weights bit for bit, or in another dtype.

    The model is loaded, so its weights have to fit into memory in the larger of both formats. Tokenizer, report and other
    files are copied. The model card is rendered again from the report; a README.md of your own stays.

    Args:
        directory_or_id (`str` or `Path`): a pruned checkpoint; one on the Hub is downloaded into the cache.
        format (`str`): `"dense"` or `"packed"`.
        output (`str` or `Path`, *optional*): where to write it. None: it replaces the directory.
        max_shard_size (`int` or `str`): bytes of a file of weights, or text such as `"500MB"`.
        revision (`str`, *optional*): branch, tag or commit on the Hub. None: main.
        token (`str`, *optional*): for a private one. None: the one of `hf auth login`, or HF_TOKEN.
        overwrite (`bool`): True to replace a model in `output` that is not pruned.
        dtype (`torch.dtype`, *optional*): of the files; `format` may then be the one that the checkpoint has.
        trust_remote_code (`bool`): True to run code that comes with the checkpoint.

    Returns:
        `Path`: the directory that was written.

    Raises:
        `ValueError`: the checkpoint is not pruned, is damaged, or has this format already; or it comes with an adapter.
        `FileExistsError`: the output holds a model that is not pruned.
        `OSError`: it cannot be read, or the output cannot be written; nothing is changed.
    """
    check_choice("format", format, FORMATS)
    source = find_source(directory_or_id, output, revision, token)
    target = check_writable(source if output is None else output, "save to")
    is_copy = not is_same(source, target)
    if is_copy:
        check_replaceable(target, overwrite)
    old = old_files(target, any(source.glob("tokenizer*"))) if is_copy else MODEL_FILES
    packed = _check(source, format if dtype is None else None)
    stored = _dtypes(source, packed) if dtype is None else {}
    model = load_model(source, whole=True, trust_remote_code=trust_remote_code)
    check_saveable(model, format, dtype)
    with replaced_checkpoint(target, old) as staging:
        write_model(model, staging, format, max_shard_size, dtype)
        _check_dtypes(stored, _dtypes(staging, format == "packed"))
        if is_copy:
            _copy_others(source, staging, target)
        if may_write_card(target):
            _write_card(model, source, staging, format, target.name, dtype)
        else:
            (staging / MODEL_CARD).unlink(missing_ok=True)
    return target


def find_source(
    directory_or_id: str | Path, output: str | Path | None, revision: str | None = None, token: str | None = None
) -> Path:
    """Return the directory of the checkpoint that [`convert_checkpoint`] reads."""
    if Path(directory_or_id).is_dir():
        finish_moves(directory_or_id)
    elif output is None:
        raise ValueError(
            f"{directory_or_id} is not a directory: check its path, or name an output for a model on the Hub."
        )
    return find_checkpoint(directory_or_id, revision, token, whole=True)


def _check(source: Path, format: str | None) -> bool:
    """Return True if the source is packed. Raise `ValueError` if it cannot be converted, or has the format already."""
    config = read_json(source / CONFIG)
    packed = is_packed(config)
    if read_sparsity_config(config) is None and not packed:  # a packed one may hold another tool's zeros
        raise ValueError(f"{source} is not pruned: prune it first, with optimum-cli neuronal prune.")
    if format == ("packed" if packed else "dense"):
        raise ValueError(f"{source} is already {format}: there is nothing to convert.")
    if not packed and config.get("quantization_config") is not None:
        raise ValueError(f"{source} is quantized: convert the checkpoint from before it was quantized.")
    if (source / ADAPTER_CONFIG).exists():
        raise ValueError(
            f"{source} holds an adapter ({ADAPTER_CONFIG}), which would be loaded with the model: move it elsewhere."
        )
    return packed


def _dtypes(folder: Path, packed: bool) -> dict[str, torch.dtype]:
    """Return name -> dtype of the floating-point tensors in a checkpoint; packed ones by their dense names."""
    tensors = itertools.chain.from_iterable(map(float_tensors, weight_files(folder, packed)))
    return {name.replace(f"{PREFIX}values", ".weight"): dtype for name, dtype, _ in tensors}


def _check_dtypes(stored: dict[str, torch.dtype], written: dict[str, torch.dtype]) -> None:
    """Raise `ValueError` if transformers has converted weights to another dtype."""
    for name, dtype in stored.items():
        if written.get(name, dtype) != dtype or dtype not in written.values():
            raise ValueError(
                f"The checkpoint stores {name} in {dtype}, but transformers loads it in another dtype, so its values would "
                "change: save the model in one dtype first."
            )


def _copy_others(source: Path, staging: Path, target: Path) -> None:
    """Copy the other files of a checkpoint, unless staging has them; no hidden files, weights, or files of the target."""
    inside = target.resolve().is_relative_to(source.resolve())
    for path in sorted(source.rglob("*")):
        if inside and path.resolve().is_relative_to(target.resolve()):
            continue
        place = staging / path.relative_to(source)
        hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
        if path.is_file() and not hidden and not path.name.endswith(WEIGHT_SUFFIXES) and not place.exists():
            if leads_out(path, source):
                logger.warning(f"{path} is a link to a file outside the checkpoint's folder: it is not copied.")
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def _write_card(model: Any, source: Path, staging: Path, format: str, title: str, dtype: torch.dtype | None) -> None:
    """Render the card for the new format, unless the source has a README.md of the user's own, or no report."""
    card, report = source / MODEL_CARD, source / REPORT_NAME
    if report.exists() and card.exists() and MARK in card.read_text(encoding="utf-8", errors="replace"):
        values = read_json(report)
        try:
            known = PruningReport(
                **{entry.name: values[entry.name] for entry in fields(PruningReport) if entry.name in values}
            )
            with_tokenizer, chats = any(source.glob("tokenizer*")), has_chat_template(source)
            text = make_card(model, known, title, format, with_tokenizer, chats, dtype)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{report} is damaged: {error!r}. Prune the model again, or delete that file.") from error
        (staging / MODEL_CARD).write_text(text, encoding="utf-8")
