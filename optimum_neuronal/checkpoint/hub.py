"""Models on the Hub: which repository a model came from, and what keeps one from being published."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel


# A folder of the Hub's cache: models--OWNER--NAME/snapshots/REVISION
SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/[^/]+/?$")
HTTPError = HfHubHTTPError.__bases__[0]  # of httpx, or of httpx2 in later releases: no connection, a timeout


def hub_id(model: PreTrainedModel) -> str | None:
    """Return the id of the repository on the Hub that a model was loaded from; None if it came from elsewhere."""
    origin = model.config.name_or_path
    if not origin:
        return None
    if (path := Path(origin)).exists():
        cached = SNAPSHOT.search(path.absolute().as_posix())
        return cached[1].replace("--", "/") if cached else None
    with suppress(HFValidationError):
        validate_repo_id(origin)
        return origin
    return None


def public_name(model: PreTrainedModel) -> str:
    """Return the name of a model for tables and figures: its id on the Hub, the name of its folder, or its class.

    No path of this machine is published.
    """
    origin = model.config.name_or_path
    return hub_id(model) or (origin and Path(origin).absolute().name) or type(model).__name__


def check_push(repo_id: str, token: str | None = None) -> None:
    """Raise what would keep a model from being published; create nothing.

    Args:
        repo_id (`str`): `"me/llama-70"`; without an owner, of the token's account.
        token (`str`, *optional*): None: the one of `hf auth login`, or HF_TOKEN.

    Raises:
        `ValueError`: the id of no repository.
        `PermissionError`: there is no token, or it may not write there.
        `ConnectionError`: the Hub cannot be reached.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is no name of a repository on the Hub: {error}") from error
    api = HfApi(token=token)
    with explained(repo_id):
        account = api.whoami()
        mine = {account["name"], *(org["name"] for org in account.get("orgs", ()) if org.get("roleInOrg") != "read")}
        owner, _, name = repo_id.rpartition("/")
        owner = owner or account["name"]
        if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise _refusal(repo_id, "the token may read only")
        try:
            api.auth_check(f"{owner}/{name}", write=True)
        except RepositoryNotFoundError as error:  # there is none yet, or the token may not see it
            if owner not in mine:
                why = f"the account may make repositories of {', '.join(sorted(mine))}, not of {owner}"
                raise _refusal(repo_id, why) from error


@contextmanager
def explained(repo_id: str) -> Iterator[None]:
    """Raise errors that say what to do where the Hub refuses, or cannot be reached."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise _refusal(repo_id, "there is no token") from error
    except HfHubHTTPError as error:
        if error.response is None or error.response.status_code not in (401, 403):
            raise
        raise _refusal(repo_id, f"it said: {error}") from error
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise ConnectionError(
            f"The Hub cannot be reached, so that {repo_id!r} cannot be published now: {error or type(error).__name__}"
        ) from error


def _refusal(repo_id: str, why: str) -> PermissionError:
    return PermissionError(
        f"The Hub refused to let you write to {repo_id!r} ({why}): log in with `hf auth login`, or set HF_TOKEN, with "
        "a token that may write there (in Python also as token=...)."
    )
