"""Saves a pruned model whole or not at all, with tokenizer, report and model card; publishes it on the Hub."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import transformers
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.notes import get_logger
from ..common.validation import check_choice, check_embedding_bits
from ..compat import hf_private
from ..files.directories import nearest_existing
from ..model.architectures import find_architecture
from ..model.experts import is_of_experts
from ..model.packed_modules import packed_modules
from ..model.packed_size import PackedSize
from ..report import PruningReport
from .card import make_card
from .hub import explained
from .names import FORMATS, GENERATION_CONFIG, MODEL_CARD, WEIGHT_FILES, is_of_weights
from .own_files import check_directory, may_write_card
from .safe_files import read_bytes
from .save_pretrained import replaced_checkpoint, write_model


logger = get_logger(__name__)

# The tokenizer, which is a part of a processor, is saved by itself.
PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json",
    "chat_template.json",
)  # fmt: skip


def save_pruned(
    model: PreTrainedModel,
    directory: str | Path,
    report: PruningReport,
    size: PackedSize,
    tokenizer: PreTrainedTokenizerBase | None = None,
    format: str | None = None,
    title: str | None = None,
) -> None:
    """Save model, tokenizer, report and model card.

    Whatever happens, a kill included, the directory holds all of the old checkpoint, all of the new one, or one without
    a config.json, which does not load; see [`replaced_directory`]. Weight files of the old one are removed; files that
    are no part of it stay. So does a README.md of the user's own; no card is written then.

    Args:
        model (`PreTrainedModel`): the pruned model.
        directory (`str` or `Path`): where to; created if missing.
        report ([`PruningReport`]): of the prune.
        size ([`PackedSize`]): of the pruned weights, embeddings and head.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): saved along.
        format (`str`, *optional*): `"dense"` or `"packed"`. None: packed if the model computes with packed weights.
        title (`str`, *optional*): of the model card. None: the directory's name.

    Raises:
        `ValueError`: there is no such format, or it cannot hold embeddings of 8 bits.
        `OSError`: the directory cannot be written, or the disk is too full. Its files are as they were.
    """
    format = check_saveable(model, format, report.config.get("embedding_bits"))
    path = check_directory(directory)
    title, with_card = title or path.name, may_write_card(path)
    check_space(model, path, size, format)
    with replaced_checkpoint(path, _is_replaced) as staging:
        write_model(model, staging, format)
        if tokenizer is not None:
            _save_tokenizer(tokenizer, staging)
        copy_processor(model, staging)
        if with_card:
            card = make_card(model, report, size, title, format, with_tokenizer=tokenizer is not None)
            card.save(staging / MODEL_CARD)
        else:
            logger.warning(f"{MODEL_CARD} of {title} is your own, so it stays, and no model card is written.")
        report.save(staging, os.listdir(staging))


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer. Raise `OSError` if the disk is full."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is Exception:  # the tokenizers library has no other for a disk
            raise OSError(str(error)) from error
        raise


def _is_replaced(name: str) -> bool:
    """Return True if an old file of this name makes no sense beside the weights of another model."""
    return is_of_weights(name) or name == GENERATION_CONFIG


def push_pruned(
    model: PreTrainedModel,
    repo_id: str,
    report: PruningReport,
    size: PackedSize,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    format: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload pruned model",
) -> str:
    """Upload the files of [`save_pruned`] to the Hub in one commit, which deletes the weights of an earlier push.

    An upload that breaks off changes nothing in the repository; repeated, it goes on with the files that are missing.

    Args:
        model, report, size, tokenizer, format: as for [`save_pruned`].
        repo_id (`str`): `"me/llama-70"`; created if missing.
        private (`bool`, *optional*): True if a repository that is created is private. None: as the account has it.
        token (`str`, *optional*): with permission to write. None: the one of `hf auth login`, or HF_TOKEN.
        revision (`str`, *optional*): branch to push to, created if missing. None: main.
        commit_message (`str`): of the commit.

    Returns:
        `str`: the commit's URL.

    Raises:
        `PermissionError`: there is no token, or it may not write there.
        `OSError`: the disk for temporary files is too full, the Hub cannot be reached, or the upload broke off.
    """
    format = check_saveable(model, format, report.config.get("embedding_bits"))
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder, explained(repo_id):
        check_space(model, folder, size, format)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with suppress(EntryNotFoundError):  # a README.md of the user's own stays
            api.hf_hub_download(repo_id, MODEL_CARD, revision=revision, local_dir=folder)
        save_pruned(model, folder, report, size, tokenizer, format, title=repo_id)
        return _upload(api, folder, repo_id, revision, commit_message)


def _upload(api: HfApi, folder: str, repo_id: str, revision: str | None, commit_message: str) -> str:
    """Upload a folder in one commit and return its URL. Raise `OSError` if the upload broke off."""
    try:
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message,
            delete_patterns=list(WEIGHT_FILES),  # except files that are uploaded
        )
    except RuntimeError as error:  # a file could not be uploaded
        raise OSError(
            f"The upload to {repo_id!r} broke off, and the repository is as it was: {error} Push again; files that have "
            "arrived are not sent again."
        ) from error
    return commit.commit_url


def copy_processor(model: PreTrainedModel, folder: Path) -> None:
    """Copy the processor's files of the checkpoint that a multimodal model was loaded from, byte by byte.

    So no library for images or sounds is needed. Files that the folder has already stay. A warning names files that
    cannot be had.

    Args:
        model (`PreTrainedModel`): its config names the checkpoint.
        folder (`Path`): where the model is saved.
    """
    config = model.config
    if config.get_text_config(decoder=True) is config or not config.name_or_path:
        return
    for name in PROCESSOR_FILES:
        try:
            path = hf_private.find_file(config, name)
            if path is not None and not (folder / name).exists():
                (folder / name).write_bytes(read_bytes(path.parent, path.name))
        except (OSError, ValueError) as error:
            logger.warning(
                f"{name} of the model's processor could not be read from {config.name_or_path!r} ({error}): if there is such "
                "a file, copy it beside the saved model."
            )


def check_saveable(model: PreTrainedModel, format: str | None, embedding_bits: int | None = None) -> str:
    """Return the format that a model is saved in.

    Args:
        model (`PreTrainedModel`): pruned, or about to be.
        format (`str`, *optional*): `"dense"` or `"packed"`. None: as `model.save_pretrained(directory)` writes.
        embedding_bits (`int`, *optional*): of its embeddings and head.

    Raises:
        `TypeError`, `ValueError`: there is no such format, it cannot hold these bits, or the model lies on disk and the
            installed transformers cannot save it.
    """
    if format is None:
        format = getattr(model.save_pretrained, "format", "dense")
    check_choice("format", format, FORMATS)
    check_embedding_bits(embedding_bits, format)
    if not hf_private.saves_offloaded_experts() and any(p.is_meta for p in model.parameters()) and _has_experts(model):
        raise ValueError(
            f"transformers {transformers.__version__} cannot save a mixture of experts whose weights are offloaded: install "
            f"{hf_private.SAVES_OFFLOADED_EXPERTS} or later, or load the model into memory."
        )
    return format


def _has_experts(model: PreTrainedModel) -> bool:
    architecture = find_architecture(model.config.get_text_config(decoder=True).model_type)
    weights = model.named_parameters()
    return any(is_of_experts(architecture.find_role(name)[1], weight.ndim) for name, weight in weights)


def check_space(model: PreTrainedModel, directory: str | Path, size: PackedSize, format: str, more: int = 0) -> None:
    """Raise `OSError` if the disk of a directory, which may not exist yet, has no room for the model's weights.

    Args:
        model (`PreTrainedModel`): pruned, or about to be.
        directory (`str` or `Path`): see [`check_directory`] for what else is raised.
        size ([`PackedSize`]): of the pruned weights, embeddings and head.
        format (`str`): `"packed"` or `"dense"`.
        more (`int`): bytes by which the prune will make the dense weights larger: a head that it unties.
    """
    path, packed = check_directory(directory), [module for _, module in packed_modules(model)]
    needed = more + sum(p.numel() * p.element_size() for p in model.parameters())
    needed += sum(module.dense_bytes for module in packed)
    offloaded = any(parameter.is_meta for parameter in model.parameters())  # written dense first, to be packed then
    if format == "packed" and not offloaded:  # some weights may be packed already, others may be so in the file alone
        needed -= max(size.dense - size.saved, sum(module.dense_bytes - module.packed_bytes for module in packed))
    check_free(path, needed)


def check_free(path: Path, needed: int) -> None:
    """Raise `OSError` if the disk of a path, which may not exist yet, has no room for so many bytes."""
    free = shutil.disk_usage(nearest_existing(path)).free
    if free < needed:
        raise OSError(
            f"Saving to {path} needs {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free: free some space or choose "
            "another disk."
        )
