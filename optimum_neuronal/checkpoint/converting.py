"""Converts a dense checkpoint to a packed one, or a packed one to a dense one: weight by weight, bit for bit."""

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..common.validation import check_choice, check_embedding_bits, check_path
from ..compat import hf_private
from ..files.directories import is_same
from ..model.load_model import load_skeleton
from ..model.weight_names import token_weights
from .card import with_format
from .names import CONFIG, FORMATS, MODEL_CARD, TOKENIZER_FOLDERS, WEIGHT_SUFFIXES, is_of_weights
from .opening import Checkpoint, find_checkpoint
from .own_files import check_directory, is_our_card, may_write_card
from .safe_files import check_file, read_bytes
from .save_pretrained import replaced_checkpoint
from .saving import check_free
from .sparsity_config import about_head
from .stored_format import add_hint, dense_config, packed_config, write_json
from .weight_writers import SHARD_SIZE, DenseWriter, PackedWriter


def convert_checkpoint(
    directory_or_id: str | Path,
    format: str,
    output: str | Path | None = None,
    max_shard_size: int | str = SHARD_SIZE,
    *,
    revision: str | None = None,
    token: str | None = None,
    embedding_bits: int | None = None,
) -> Path:
    """Write a pruned checkpoint in the other format, bit for bit the same weights unless values are to be rounded.

    No model is loaded; one weight and the file that is being written are held in memory. Tokenizer, report, model card and
    other small files come along; `config.json` and the model card are changed to the format. A README.md of the user's own
    in the output stays. As with every save, a kill leaves no mixture of old and new files.

    Args:
        directory_or_id (`str` or `Path`): of a pruned checkpoint; one on the Hub is downloaded into the cache.
        format (`str`): `"dense"` or `"packed"`.
        output (`str` or `Path`, *optional*): where to write it. None: it takes the directory's place.
        max_shard_size (`int` or `str`): bytes of a file of weights, or text such as `"500MB"`.
        revision (`str`, *optional*): branch, tag or commit on the Hub. None: main.
        token (`str`, *optional*): for a private one. None: the one of `hf auth login`, or HF_TOKEN.
        embedding_bits (`int`, *optional*):
            8, with `format="packed"`, which the checkpoint may have already: token embeddings and head are rounded to so many
            bits. None: they stay as they are.

    Returns:
        `Path`: the directory that was written.

    Raises:
        `ValueError`: the checkpoint is damaged, not pruned, or has that format already; or was quantised, and is to be packed
            though it holds no codes; or its values cannot be rounded.
        `OSError`: it cannot be read, or the output cannot be written; nothing is changed.
    """
    check_choice("format", format, FORMATS)
    check_embedding_bits(embedding_bits, format)
    size, source = hf_private.bytes_of(max_shard_size), find_source(directory_or_id, output, revision, token)
    checkpoint = Checkpoint(source)
    target = check_directory(source if output is None else output)
    in_place = is_same(target, source)
    sparsity_config, rounded = _check(checkpoint, format, in_place, embedding_bits), set()
    if embedding_bits is not None:
        rounded = _find_head(source, sparsity_config, [weight.name for weight in checkpoint.weights])
        sparsity_config |= about_head(rounded)
    others = [] if in_place else _others(source)
    dense = sum(weight.dense_bytes for weight in checkpoint.weights)
    check_free(target, dense if format == "dense" else int(dense * (1 - sparsity_config["achieved_sparsity"])))
    with replaced_checkpoint(target, is_of_weights) as staging:
        with PackedWriter(staging, size, rounded) if format == "packed" else DenseWriter(staging, size) as writer:
            for weight in logging.tqdm(
                checkpoint.weights, desc=f"Writing {format}", unit="weight", leave=False, disable=None
            ):
                if isinstance(writer, PackedWriter) and weight.is_packed and weight.name not in rounded:
                    writer.add_packed(weight.name, weight.read_packed(), weight.transposed)
                else:
                    writer.add(weight.name, weight[...])
        for name in others:
            (staging / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(check_file(source, name), staging / name)
        change = packed_config if format == "packed" else dense_config
        write_json(staging / CONFIG, change(checkpoint.config | {"sparsity_config": sparsity_config}))
        if isinstance(writer, PackedWriter):
            add_hint(staging, writer.quantized)
        if may_write_card(target):
            _write_card(source, staging, format, sparsity_config)
        else:
            (staging / MODEL_CARD).unlink(missing_ok=True)
    return target


def find_source(
    directory_or_id: str | Path, output: str | Path | None, revision: str | None = None, token: str | None = None
) -> Path:
    """Return the directory of a checkpoint that is to be converted; download one on the Hub into the cache.

    [`convert_checkpoint`] has the arguments.

    Raises:
        `ValueError`: it is no directory, and there is no output; or the id of no model.
        `OSError`: it cannot be had.
    """
    if output is None and not Path(check_path("directory_or_id", directory_or_id)).is_dir():
        raise ValueError(
            f"{directory_or_id} is no directory: check its path; or, if it is the id of a model on the Hub, name an output."
        )
    return find_checkpoint(directory_or_id, revision, token, whole=True)


def _find_head(directory: Path, sparsity_config: Mapping[str, Any], names: list[str]) -> set[str]:
    """Return the names of embeddings and head in a checkpoint whose weights have these names. Raise `ValueError` if it holds none."""
    known = sparsity_config.get("head_weights") or token_weights(load_skeleton(directory))
    found = head_names(known, names)
    if not found:
        raise ValueError(
            f"{directory} holds no token embeddings and no head ({', '.join(known) or 'none are known'}): leave "
            "embedding_bits out."
        )
    return found


def _check(checkpoint: Checkpoint, format: str, in_place: bool, embedding_bits: int | None) -> dict[str, Any]:
    """Return a checkpoint's sparsity_config. Raise `ValueError` if it cannot be converted to a format and bits of its head."""
    if checkpoint.sparsity_config is None:
        raise ValueError(
            f"{checkpoint.directory} is not pruned (its config.json has no sparsity_config): prune it first, with "
            "optimum-cli neuronal prune."
        )
    if checkpoint.format == format and embedding_bits in (None, checkpoint.sparsity_config.get("embedding_bits")):
        bits = "" if embedding_bits is None else f", with a head of {embedding_bits} bits"
        raise ValueError(f"{checkpoint.directory} is {format} already{bits}.")
    if checkpoint.format == "dense" and checkpoint.sparsity_config.get("bits_per_weight") is not None:
        raise ValueError(
            f"{checkpoint.directory} was quantised, and is stored dense: its files hold no codes, so that nothing would be smaller "
            "packed. Take the packed checkpoint that it was made of, or quantise the dense model again."
        )
    names = [weight.name for weight in checkpoint.weights]
    if len(names) != len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{checkpoint.directory} is damaged: several of its files hold {twice!r}.")
    if in_place and any(path.is_symlink() for path in checkpoint.files):
        raise ValueError(f"The files of {checkpoint.directory} are links, as in the Hub's cache: name another output.")
    return checkpoint.sparsity_config


def head_names(recorded: Iterable[str], names: Collection[str]) -> set[str]:
    """Return the checkpoint's names of the recorded weights, which may have some leading parts more or fewer."""
    found = set()
    for known in recorded:
        ends = {name for name in names if name.endswith(f".{known}") or known.endswith(f".{name}")}
        found |= {known} if known in names else ends
    return found


def _others(source: Path) -> list[str]:
    """Return the names of the files beside the weights, and in a tokenizer's folders, after checking each.

    Hidden files, other folders and weights, of other tools too, are left out.
    """
    found = []
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False) and entry.name in TOKENIZER_FOLDERS:
            found += [f"{entry.name}/{name}" for name in _files(entry.path)]
    found += [name for name in _files(source) if not name.endswith(WEIGHT_SUFFIXES) and name != CONFIG]
    for name in found:
        check_file(source, name)
    return found


def _files(folder: str | Path) -> list[str]:
    """Return the names of all that is no folder, in order, but for hidden ones."""
    return sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir() and not entry.name.startswith("."))


def _write_card(source: Path, staging: Path, format: str, sparsity_config: Mapping[str, Any]) -> None:
    """Write the README.md of the source, if there is one; a card of this package says how to load the format."""
    if not (source / MODEL_CARD).exists():
        return
    card = read_bytes(source, MODEL_CARD)
    with suppress(UnicodeDecodeError):
        if is_our_card(card):
            card = with_format(card.decode("utf-8"), format, sparsity_config).encode("utf-8")
    (staging / MODEL_CARD).write_bytes(card)
