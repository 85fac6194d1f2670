"""Whether a model can be published: asked before the long work that makes it, and explained where it turns out not so."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id


REFUSED = (401, 403)  # status codes
HTTPError = HfHubHTTPError.__bases__[0]  # of httpx, or of httpx2 in later releases: no connection, a timeout


def check_push(repo_id: str, token: str | None = None) -> None:
    """Raises what would keep a model from being published; creates nothing.

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
        owner, _, name = repo_id.rpartition("/")
        owner = owner or account["name"]
        if _role(account) == "read":
            raise _refusal(repo_id, "the token may read only")
        try:
            api.auth_check(f"{owner}/{name}", write=True)
        except RepositoryNotFoundError as error:  # none yet, or none that the token may see
            if owner not in _namespaces(account):
                mine = ", ".join(sorted(_namespaces(account)))
                raise _refusal(repo_id, f"the account may make repositories of {mine}, not of {owner}") from error


def _role(account: Mapping[str, Any]) -> str | None:
    """What the token is for: `"read"`, `"write"`, `"fineGrained"`, or None if the Hub does not tell."""
    return account.get("auth", {}).get("accessToken", {}).get("role")


def _namespaces(account: Mapping[str, Any]) -> set[str]:
    """Who the account may make repositories for: itself, and organisations in which it may do more than read."""
    return {account["name"], *(org["name"] for org in account.get("orgs", ()) if org.get("roleInOrg") != "read")}


@contextmanager
def explained(repo_id: str) -> Iterator[None]:
    """What the Hub refuses, or a Hub that cannot be reached, is an error that says what to do."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise _refusal(repo_id, "there is no token") from error
    except HfHubHTTPError as error:
        if error.response is None or error.response.status_code not in REFUSED:
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
