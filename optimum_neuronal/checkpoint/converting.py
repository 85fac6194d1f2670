"""Converts a dense checkpoint to a packed one and back, with the same weights bit for bit."""

from pathlib import Path

import torch

from ..files.output import check_output, new_directory
from ..model.load_model import load_model
from ..model.sources import check_directory
from ..model.unread_formats import quantization_of
from ..packed.packed_weight import PREFIX
from ..report import REPORT_NAME, PruningReport
from .card import write_card
from .carrying import carry_over
from .hub import find_checkpoint
from .names import CONFIG, MODEL_CARD, TOKENIZER_FILES
from .packed_files import is_packed, map_tensors, read_headers, read_json, stored_dtypes, weight_files
from .saving import check_saveable
from .writing import SHARD_SIZE, SaveOptions, write_model


def convert_checkpoint(
    directory_or_id: str | Path,
    format: str,
    output: str | Path,
    max_shard_size: int | str = SHARD_SIZE,
    *,
    revision: str | None = None,
    token: str | None = None,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write a sparse checkpoint in a format, with the same weights bit for bit, or in another dtype.

    The model is loaded, so its weights have to fit into memory in the larger of both formats. Tokenizer, report and the
    files that [`save_pruned`] carries over are copied. The model card is rendered again from the report.

    Args:
        directory_or_id (`str` or `Path`): a checkpoint with zeros, pruned by any tool; one on the Hub is downloaded into the cache.
        format (`str`): `"dense"` or `"packed"`.
        output (`str` or `Path`): where to write it: absent, or an empty directory.
        max_shard_size (`int` or `str`): bytes of a file of weights, or text such as `"500MB"`.
        revision (`str`, *optional*): branch, tag or commit on the Hub. None: main.
        token (`str`, *optional*): for a private one. None: the one of `hf auth login`, or HF_TOKEN.
        overwrite (`bool`): True to replace a directory that holds a model, with all that is in it.
        dtype (`torch.dtype`, *optional*): of the files. None: the checkpoint's.
        trust_remote_code (`bool`): True to run code that comes with the checkpoint.

    Returns:
        `Path`: the directory that was written.

    Raises:
        `ValueError`: the checkpoint is dense, quantized or damaged.
        `FileExistsError`: something lies at the output that may not be replaced.
        `OSError`: it cannot be read, or the output cannot be written.
    """
    options = SaveOptions(format, dtype, max_shard_size)
    target = check_output(output, overwrite, [directory_or_id])
    source = find_checkpoint(directory_or_id, revision, token)
    check_directory(source)
    config = read_json(source / CONFIG)
    packed = is_packed(config)
    if not packed and quantization_of(config, source) is not None:
        raise ValueError(f"{source} is quantized: convert the checkpoint from before it was quantized.")
    # The config's dtype is not theirs if they were rounded.
    stored, finer = stored_dtypes(map_tensors(weight_files(source, packed)))
    if format == "dense" and any(PREFIX in name for name in finer):
        raise ValueError(f"{source} packs weights in several dtypes, of which some would be rounded: save it in one.")
    model = load_model(source, dtype=stored or "auto", trust_remote_code=trust_remote_code)
    check_saveable(model, options)
    with new_directory(target) as folder:
        write_model(model, folder, options)
        if format == "packed" and not read_headers(weight_files(folder, packed=True)):
            raise ValueError(f"No weight of {source} has enough zeros to be smaller packed: prune the model first.")
        carry_over(model, folder, others=(*TOKENIZER_FILES, REPORT_NAME, MODEL_CARD))
        if report := PruningReport.load(source):
            write_card(folder, model, report, target.path.name, options)
    return target.path
