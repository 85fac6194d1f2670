"""Saves models dense or packed, whole or not at all, and pruned ones with their report and model card."""

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.notes import get_logger
from ..compat import hf_private
from ..files.output import Output, check_output, new_directory
from ..model.load_model import first_names, skeleton_of
from ..packed.packed_module import packed_modules
from ..packed.packed_weight import PREFIX
from ..report import PruningReport
from .card import write_card
from .carrying import carry_over
from .writing import SHARD_SIZE, SaveOptions, find_extra, write_configs, write_model


logger = get_logger(__name__)


def save_pretrained(
    model: PreTrainedModel,
    save_directory: str | Path,
    format: str = "dense",
    max_shard_size: int | str = SHARD_SIZE,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Save a model dense, as transformers does, or packed, in a new directory, which appears whole.

    ```python
    model = AutoModelForCausalLM.from_pretrained("llama-70")
    save_pretrained(model, "llama-70-packed", format="packed")
    ```

    Args:
        model (`PreTrainedModel`): a sparse model, in memory or offloaded; from `torch.compile`, the model inside is saved.
        save_directory (`str` or `Path`): absent, or an empty directory.
        format (`str`):
            `"dense"`: ordinary safetensors with zeros. `"packed"`: bitmasks and nonzero values; all packed weights are in
            memory while they are written.
        max_shard_size (`int` or `str`): bytes of a file, or text such as `"500MB"`.
        dtype (`torch.dtype`, *optional*): of the files; the model itself keeps its own. None: the model's.
        overwrite (`bool`): True to replace a directory that holds a model, with all that is in it.

    Raises:
        `TypeError`: this is not a transformers model, or not a floating-point dtype.
        `ValueError`: the format is unknown or does not support the dtype, or the model has adapters.
        `FileExistsError`: something lies there that may not be replaced.
        `OSError`: the directory cannot be written, or the disk is full.
    """
    options = check_saveable(model, SaveOptions(format, dtype, max_shard_size))
    output = check_output(save_directory, overwrite, [model.config.name_or_path])
    save_pruned(model, output, None, None, options)


def save_pruned(
    model: PreTrainedModel,
    output: Output,
    report: PruningReport | None,
    tokenizer: PreTrainedTokenizerBase | None,
    options: SaveOptions,
    title: str | None = None,
) -> None:
    """Save model, tokenizer, report and, with a report, the model card, whose title is the directory's name by default.

    `options` come from [`check_saveable`].
    """
    model = hf_private.uncompiled(model)
    with new_directory(output) as folder:
        write_model(model, folder, options)
        carry_over(model, folder, tokenizer)
        if report is not None:
            report.save(folder)
            write_card(folder, model, report, title or output.path.name, options)


def check_saveable(model: PreTrainedModel, options: SaveOptions) -> SaveOptions:
    """Return how a model is saved, by default packed if it computes with packed weights.

    Raise `TypeError` or `ValueError` if it could not be saved so.
    """
    model = hf_private.uncompiled(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"Expected a PreTrainedModel, got a {type(model).__name__}. Merge adapters before you save.")
    if options.format is None:
        options = replace(options, format="packed" if next(packed_modules(model), None) else "dense")
    try:
        state: dict[str, Any] = hf_private.untied(model, model.state_dict())
        state |= {name + module.suffix: module.weight for name, module in packed_modules(model)}
        on_meta = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in state.items() if PREFIX not in n}
        lacking, _ = hf_private.match_names(skeleton_of(model), hf_private.as_stored(model, on_meta))
        with tempfile.TemporaryDirectory() as folder:
            write_configs(model, copy.deepcopy(model.config), Path(folder))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"The model cannot be saved: {error}") from error
    if lacking:
        raise ValueError(
            f"{first_names(lacking)} would be lost: first merge adapters with PEFT's merge_and_unload(), unwrap compiled "
            "modules, and make computed weights permanent, as with torch.nn.utils.prune.remove."
        )
    if lost := find_extra(model)[1]:
        logger.warning(
            f"transformers does not load {first_names(lost)} of {model.config.name_or_path}: the saved model is without."
        )
    return options
