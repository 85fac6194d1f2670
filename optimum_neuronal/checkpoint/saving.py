"""Saves a pruned model whole or not at all, with its tokenizer, its report and a model card; publishes it on the Hub."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..compat import transformers as internals
from ..files.atomic import replaced_directory
from ..files.directories import check_writable, nearest_existing
from ..model.architectures import find_architecture, is_of_experts
from ..model.find_blocks import find_decoder
from ..model.packed_modules import packed_modules
from ..report import PruningReport
from ..system.notes import get_logger
from .card_file import name_for_card, seal
from .hub_access import explained
from .model_card import make_card
from .names import (
    CONFIG,
    FILES,
    GENERATION_CONFIG,
    MODEL_CARD,
    PACKED_INDEX,
    SPARE_MODEL_CARD,
    WEIGHT_FILES,
    is_of_weights,
)
from .packed_size import packed_size
from .processor_files import copy_processor


logger = get_logger(__name__)

# A shard of an offloaded model is held in memory while it is written: at most a block, of which pruning holds several, or
# this many bytes.
OFFLOADED_SHARD = 64 * 10**6


def check_directory(directory: str | Path) -> Path:
    """Raises before long work what would keep a model from being saved in `directory`; creates nothing.

    Raises:
        `ValueError`, `OSError`: the directory cannot be written, see [`check_writable`].
        `FileExistsError`: it holds a folder where a file of a checkpoint belongs.
    """
    path = check_writable(directory, "save to")
    for name in FILES:
        if (path / name).is_dir():
            raise FileExistsError(f"{path / name} is a folder in the way: rename it or choose another directory.")
    return path


def save_pruned(
    model: PreTrainedModel,
    directory: str | Path,
    report: PruningReport,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Saves model, tokenizer, report and model card.

    Whatever happens, a kill included, the directory holds all of the old checkpoint or all of the new one, see
    [`replaced_directory`]. Weight files of the old one are removed; files that are no part of it stay, and so does a
    README.md that is no card that this package wrote, or was edited since: the new card is then written beside it.

    Args:
        model (`PreTrainedModel`): the pruned model; saved as ordinary safetensors.
        directory (`str` or `Path`): where to; created if missing.
        report ([`PruningReport`]): of the prune.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): saved along.

    Raises:
        `OSError`: the directory is a file or cannot be written, or the disk is too full. Its files are as they were.
    """
    check_saveable(model)
    path = check_directory(directory)
    check_space(model, path, report.config, report.achieved_sparsity, default_format(model))
    card = _name_for_card(path, f"{path / MODEL_CARD}")
    with replaced_checkpoint(path, _is_replaced) as staging:
        _write(model, staging, report, tokenizer, path.name, card)


@contextmanager
def replaced_checkpoint(path: Path, belongs: Callable[[str], bool]) -> Iterator[Path]:
    """[`replaced_directory`], with errors that say that nothing was changed."""
    try:
        with replaced_directory(path, belongs, last=CONFIG) as staging:
            yield staging
    except (OSError, SafetensorError) as error:
        raise OSError(f"Saving to {path} failed, and its files are as they were: {error}") from error


def _is_replaced(name: str) -> bool:
    """Whether an old file of this name makes no sense beside the weights of another model."""
    return is_of_weights(name) or name == GENERATION_CONFIG


def push_pruned(
    model: PreTrainedModel,
    repo_id: str,
    report: PruningReport,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload pruned model",
) -> str:
    """Uploads to the Hub what [`save_pruned`] saves, in one commit, which also deletes the weights of an earlier push.

    An upload that breaks off changes nothing in the repository; repeated, it goes on with the files that are missing.

    Args:
        model, report, tokenizer: as for [`save_pruned`].
        repo_id (`str`): `"me/llama-70"`; created if missing.
        private (`bool`, *optional*): whether a repository that is created is private. None: as the account has it.
        token (`str`, *optional*): with permission to write. None: the one of `hf auth login`, or HF_TOKEN.
        revision (`str`, *optional*): branch to push to, created if missing. None: main.
        commit_message (`str`): of the commit.

    Returns:
        `str`: the commit's URL.

    Raises:
        `PermissionError`: there is no token, or it may not write there.
        `OSError`: the disk for temporary files is too full, the Hub cannot be reached, or the upload broke off.
    """
    check_saveable(model)
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder, explained(repo_id):
        check_space(model, folder, report.config, report.achieved_sparsity, default_format(model))
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        card = _name_on_hub(api, repo_id, revision)
        _write(model, Path(folder), report, tokenizer, repo_id, card)
        return _upload(api, folder, repo_id, revision, commit_message)


def _name_on_hub(api: HfApi, repo_id: str, revision: str | None) -> str:
    """The name under which the card replaces none in the repository that was edited, or is of another make."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (MODEL_CARD, SPARE_MODEL_CARD):
            with suppress(EntryNotFoundError):
                api.hf_hub_download(repo_id, name, revision=revision, local_dir=folder)
        return _name_for_card(Path(folder), f"{MODEL_CARD} of {repo_id}")


def _name_for_card(folder: Path, told: str) -> str:
    """[`name_for_card`], with a warning if a card stays, which is told of under this name."""
    card = name_for_card(folder)
    if card != MODEL_CARD:
        logger.warning(
            f"{told} is no model card that this package wrote, or was edited since: it stays, and the new card is in {card}."
        )
    return card


def _upload(api: HfApi, folder: str, repo_id: str, revision: str | None, commit_message: str) -> str:
    """Uploads a folder in one commit and returns its URL. Raises `OSError` if the upload broke off."""
    try:
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message,
            delete_patterns=list(WEIGHT_FILES),  # but for those that are uploaded
        )
    except RuntimeError as error:  # what a file that could not be uploaded gives
        raise OSError(
            f"The upload to {repo_id!r} broke off, and the repository is as it was: {error} Push again; files that have "
            "arrived are not sent again."
        ) from error
    return commit.commit_url


def _write(
    model: PreTrainedModel,
    folder: Path,
    report: PruningReport,
    tokenizer: PreTrainedTokenizerBase | None,
    title: str,
    card: str,
) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        with internals.known_as_offloaded(model):
            model.save_pretrained(folder, max_shard_size=max(OFFLOADED_SHARD, _largest_block(model)))
    else:
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    copy_processor(model, folder)
    format = "packed" if (folder / PACKED_INDEX).exists() else "dense"
    text = make_card(model, report, title, format, with_tokenizer=tokenizer is not None)
    (folder / card).write_text(seal(str(text)), encoding="utf-8")
    report.save(folder, os.listdir(folder))


def _largest_block(model: PreTrainedModel) -> int:
    """Bytes of the largest module in any list of modules: a decoder block."""
    blocks = [block for modules in model.modules() if isinstance(modules, nn.ModuleList) for block in modules]
    return max(sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks)


def check_saveable(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a model on disk that the installed transformers cannot save."""
    offloaded = any(parameter.is_meta for parameter in model.parameters())
    if offloaded and _has_experts(model) and not internals.saves_offloaded_experts():
        raise ValueError(
            f"transformers {internals.release()} cannot save a mixture of experts whose weights are offloaded: install "
            f"{internals.SAVES_OFFLOADED_EXPERTS} or later, or load the model into memory."
        )


def _has_experts(model: PreTrainedModel) -> bool:
    architecture = find_architecture(model.config.get_text_config(decoder=True).model_type)
    weights = model.named_parameters()
    return any(is_of_experts(architecture.find_role(name)[1], weight.ndim) for name, weight in weights)


def default_format(model: PreTrainedModel) -> str:
    """`"packed"` or `"dense"`: what `model.save_pretrained(directory)` writes."""
    return getattr(model.save_pretrained, "format", "dense")


def check_space(
    model: PreTrainedModel, directory: str | Path, config: Mapping[str, Any], sparsity: float, format: str
) -> None:
    """Raises `OSError` if the disk of a directory, which may not exist yet, has no room for the model's weights.

    Args:
        model (`PreTrainedModel`): pruned, or about to be.
        directory (`str` or `Path`): see [`check_directory`] for what else is raised.
        config (`Mapping`): of the prune: `targets`, `ignore`, `value_bits` and `embedding_bits`.
        sparsity (`float`): share of zeros in the weights that are pruned, in [0, 1).
        format (`str`): `"packed"` or `"dense"`.
    """
    path, packed = check_directory(directory), [module for _, module in packed_modules(model)]
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    needed += sum(module.packed_bytes if format == "packed" else module.dense_bytes for module in packed)
    offloaded = any(parameter.is_meta for parameter in model.parameters())  # written dense first, to be packed then
    if format == "packed" and not packed and not offloaded:
        decoder = find_decoder(model, config["targets"], config["ignore"])
        bits = config.get("value_bits"), config.get("embedding_bits")
        size = packed_size(decoder, lambda p: int(sparsity * p.numel), *bits)
        needed -= size.dense - size.saved
    check_free(path, needed)


def check_free(path: Path, needed: int) -> None:
    """Raises `OSError` if the disk of a path, which may not exist yet, has no room for so many bytes."""
    free = shutil.disk_usage(nearest_existing(path)).free
    if free < needed:
        raise OSError(
            f"Saving to {path} needs {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free: free some space or choose "
            "another disk."
        )
