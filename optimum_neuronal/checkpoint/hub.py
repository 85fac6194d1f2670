"""Models on the Hub: downloads them, and publishes pruned ones."""

import os
import tempfile
from pathlib import Path

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.connection import is_connected
from ..files.output import Output
from ..report import PruningReport
from .names import CARRIED, TOKENIZER_FILES, WEIGHT_FILES
from .saving import check_saveable, save_pruned
from .writing import SaveOptions


GIT_ATTRIBUTES = ".gitattributes"  # the Hub writes it into new repositories


def find_checkpoint(
    directory_or_id: str | Path,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | None = None,
) -> Path:
    """Return the directory of a checkpoint, downloaded if it is on the Hub."""
    if os.path.isdir(directory_or_id):
        return Path(directory_or_id)
    try:
        folder = snapshot_download(
            str(directory_or_id),
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            allow_patterns=["*.json", "*.md", *WEIGHT_FILES, *CARRIED, *TOKENIZER_FILES],
        )
    except HFValidationError as error:
        raise ValueError(f"{directory_or_id} is neither a directory nor the id of a model on the Hub.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise OSError(
            f"{directory_or_id} is not a directory, and could not be downloaded from the Hub: {error} If it is private, log "
            "in with `hf auth login` or set HF_TOKEN."
        ) from error
    return Path(folder)


def check_push(repo_id: str, token: str | None = None, overwrite: bool = False) -> None:
    """Raise an error if a model cannot be published as `repo_id`, see [`push_pruned`]. Nothing is created."""
    validate_repo_id(repo_id)
    api = _connect(token)
    account = api.whoami()
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise PermissionError(f"The token may not write to {repo_id!r}: log in with `hf auth login`, or set HF_TOKEN.")
    mine = {account["name"], *(org["name"] for org in account.get("orgs", ()) if org.get("roleInOrg") != "read")}
    owner, name = repo_id.split("/") if "/" in repo_id else (account["name"], repo_id)
    try:
        api.auth_check(f"{owner}/{name}", write=True)
    except RepositoryNotFoundError as error:  # not created yet, or hidden from this token
        if owner not in mine:
            raise PermissionError(
                f"Permission denied for {repo_id!r}: your account can only create repositories of {', '.join(sorted(mine))}."
            ) from error
    else:
        _check_repository(api, f"{owner}/{name}", None, overwrite)


def _connect(token: str | None) -> HfApi:
    if not is_connected():
        raise ConnectionError(
            f"{constants.ENDPOINT} cannot be reached: check the network, and that HF_HUB_OFFLINE is not set."
        )
    return HfApi(token=token)


def _check_repository(api: HfApi, repo_id: str, revision: str | None, overwrite: bool) -> None:
    """Raise `FileExistsError` if a branch of a repository holds files, unless they may be replaced."""
    try:
        files = set(api.list_repo_files(repo_id, revision=revision)) - {GIT_ATTRIBUTES}
    except RevisionNotFoundError:  # a new branch
        return
    if files and not overwrite:
        raise FileExistsError(
            f"The repository {repo_id!r} holds {len(files):,} files: choose a new one, or pass --overwrite (overwrite=True) "
            "to replace all files in it."
        )


def push_pruned(
    model: PreTrainedModel,
    repo_id: str,
    report: PruningReport | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    private: bool | None = None,
    overwrite: bool = False,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload pruned model",
) -> str:
    """Upload the files of [`save_pruned`] to the Hub in one commit, after which the branch holds nothing else.

    Args:
        model, report, tokenizer: as for [`save_pruned`].
        repo_id (`str`): `"me/llama-70"`; created if missing.
        format (`str`, *optional*): `"dense"` or `"packed"`. None: packed if the model computes with packed weights.
        dtype (`torch.dtype`, *optional*): of the files. None: the model's.
        private (`bool`, *optional*): True to create a private repository. None: your account's default.
        overwrite (`bool`): True to replace all files of a branch that holds some. Git keeps the earlier commits.
        token (`str`, *optional*): with permission to write. None: the one of `hf auth login`, or HF_TOKEN.
        revision (`str`, *optional*): branch to push to, created if missing. None: main.
        commit_message (`str`): of the commit.

    Returns:
        `str`: the commit's URL.

    Raises:
        `FileExistsError`: the branch holds files.
        `OSError`, `RuntimeError`: no token or connection, a full temporary disk, or an upload that the Hub refuses.
            The branch is unchanged.
    """
    options = check_saveable(model, SaveOptions(format, dtype))
    api = _connect(token)
    with tempfile.TemporaryDirectory() as folder:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        _check_repository(api, repo_id, revision, overwrite)
        if private:  # it may have existed
            api.update_repo_settings(repo_id, private=True)
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        saved = Path(folder) / "model"
        save_pruned(model, Output(saved), report, tokenizer, options, title=repo_id)
        new = {file.relative_to(saved).as_posix(): file for file in saved.rglob("*") if file.is_file()}
        old = set(api.list_repo_files(repo_id, revision=revision)) - {GIT_ATTRIBUTES, *new}
        # Not `upload_folder`, which may make several commits.
        changes = [CommitOperationDelete(name) for name in sorted(old)]
        changes += [CommitOperationAdd(name, file) for name, file in new.items()]
        commit = api.create_commit(repo_id, changes, commit_message=commit_message, revision=revision)
    return commit.commit_url
