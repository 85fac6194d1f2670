"""Models on the Hub: downloads them, and publishes pruned ones."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.connection import HTTPError
from ..model.sparsity_config import KEY, is_own
from ..report import PruningReport
from .names import (
    ADAPTER_CONFIG,
    CONFIG,
    FOREIGN_SUFFIXES,
    MODEL_CARD,
    WEIGHT_FILES,
    WEIGHT_SUFFIXES,
)
from .packed_files import read_json
from .saving import check_saveable, old_files, save_pruned, warn_of_adapter


def find_checkpoint(
    directory_or_id: str | Path,
    revision: str | None = None,
    token: str | None = None,
    whole: bool = False,
    cache_dir: str | None = None,
) -> Path:
    """Return the directory of a checkpoint, downloaded if it is on the Hub. `whole`: not only config and weights."""
    if os.path.isdir(directory_or_id):
        return Path(directory_or_id)
    if os.path.isfile(directory_or_id):
        raise NotADirectoryError(f"{directory_or_id} is a file: name the directory of a model, or its id on the Hub.")
    try:
        folder = snapshot_download(
            str(directory_or_id),
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            allow_patterns=None if whole else [CONFIG, ADAPTER_CONFIG, *WEIGHT_FILES],
            ignore_patterns=[f"*{suffix}" for suffix in FOREIGN_SUFFIXES],
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
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is not a valid name of a repository on the Hub: {error}") from error
    api = HfApi(token=token)
    with _explained(repo_id):
        account = api.whoami()
        mine = {account["name"], *(org["name"] for org in account.get("orgs", ()) if org.get("roleInOrg") != "read")}
        owner, name = repo_id.split("/") if "/" in repo_id else (account["name"], repo_id)
        if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise _refusal(repo_id, "the token is read-only")
        try:
            api.auth_check(f"{owner}/{name}", write=True)
        except RepositoryNotFoundError as error:  # not created yet, or hidden from this token
            if owner not in mine:
                raise _refusal(
                    repo_id, f"your account can only create repositories of {', '.join(sorted(mine))}"
                ) from error
        else:
            _check_replaceable(api, f"{owner}/{name}", None, overwrite)


def _check_replaceable(api: HfApi, repo_id: str, revision: str | None, overwrite: bool) -> None:
    """Raise `FileExistsError` if a repository holds a model that is not a pruned one, unless it may be overwritten."""
    try:
        files = api.list_repo_files(repo_id, revision=revision)
    except RevisionNotFoundError:  # a new branch
        return
    if ADAPTER_CONFIG in files:
        warn_of_adapter(repo_id)
    if overwrite or not any(name == CONFIG or name.endswith(WEIGHT_SUFFIXES) for name in files):
        return
    config = read_json(Path(api.hf_hub_download(repo_id, CONFIG, revision=revision))) if CONFIG in files else {}
    if not is_own(config.get(KEY)):
        raise FileExistsError(
            f"The repository {repo_id!r} holds a model that is not a pruned one. Choose another repository, or pass "
            "--overwrite (overwrite=True) to replace the model in it. Other files stay."
        )


def push_pruned(
    model: PreTrainedModel,
    repo_id: str,
    report: PruningReport,
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
    """Upload the files of [`save_pruned`] to the Hub in one commit, which deletes what is left of an older model.

    Args:
        model, report, tokenizer: as for [`save_pruned`].
        repo_id (`str`): `"me/llama-70"`; created if missing.
        format (`str`, *optional*): `"dense"` or `"packed"`. None: packed if the model computes with packed weights.
        dtype (`torch.dtype`, *optional*): of the files. None: the model's.
        private (`bool`, *optional*): True to create a private repository. None: your account's default.
        overwrite (`bool`): True to replace a model in the repository that is not a pruned one.
        token (`str`, *optional*): with permission to write. None: the one of `hf auth login`, or HF_TOKEN.
        revision (`str`, *optional*): branch to push to, created if missing. None: main.
        commit_message (`str`): of the commit.

    Returns:
        `str`: the commit's URL.

    Raises:
        `PermissionError`: there is no token, or it may not write there.
        `FileExistsError`: the repository holds a model that is not a pruned one.
        `OSError`: the temporary disk is full, the Hub cannot be reached, or the upload failed. The repository is unchanged.
    """
    check_saveable(model, format, dtype)
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder, _explained(repo_id):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        _check_replaceable(api, repo_id, revision, overwrite)
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with suppress(EntryNotFoundError):  # a README.md of the user's own stays
            api.hf_hub_download(repo_id, MODEL_CARD, revision=revision, local_dir=folder)
        save_pruned(model, folder, report, tokenizer, format, title=repo_id, dtype=dtype)
        try:
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
                delete_patterns=old_files(Path(folder), tokenizer is not None),  # except files that are uploaded
            )
        except RuntimeError as error:  # a file could not be uploaded
            raise OSError(
                f"The upload to {repo_id!r} failed: {error} Push again: uploaded files are not sent twice."
            ) from error
    return commit.commit_url


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Raise an error that says what to do if the Hub refuses or cannot be reached."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise _refusal(repo_id, "there is no token") from error
    except HfHubHTTPError as error:
        if error.response is None or error.response.status_code not in (401, 403):
            raise
        raise _refusal(repo_id, str(error)) from error
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise ConnectionError(
            f"{repo_id!r} cannot be published, because the Hub cannot be reached: {error or type(error).__name__}"
        ) from error


def _refusal(repo_id: str, why: str) -> PermissionError:
    return PermissionError(
        f"The Hub did not let you write to {repo_id!r} ({why}). Log in with `hf auth login`, or set HF_TOKEN, with a token "
        "that may write there."
    )
