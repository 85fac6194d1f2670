"""Loads text datasets from the Hub, or asks whether that can be done."""

from collections.abc import Iterator
from contextlib import contextmanager

from .hub_datasets import HubDataset
from .texts import ALTERNATIVES, Documents, from_dataset


def from_hub(spec: HubDataset, name: str, role: str) -> Documents:
    """Loads a dataset; without a connection, what was loaded before.

    Args:
        spec ([`HubDataset`]): which, and how it is used.
        name (`str`): what the user calls it.
        role (`"train"` or `"test"`): which of its splits.

    Raises:
        `RuntimeError`: it could not be loaded.
    """
    import datasets

    test = role == "test"
    split, file = (spec.test_split, spec.test_file) if test else (spec.train_split, spec.train_file)
    files = {split: file} if file else None
    no_connection = connection_error(spec.hub_id)
    try:
        with _offline_mode(no_connection is not None):
            data = datasets.load_dataset(
                spec.hub_id, spec.config, data_files=files, split=split, revision=spec.revision
            )
    except Exception as error:  # of many kinds: no network, no such id, config or split, gated, a full disk
        cause = no_connection or error
        raise _not_loaded(f"{name!r} ({spec.hub_id}, split {split!r})", cause, no_connection is not None) from cause
    if test and spec.test_documents:
        data = data.select(range(min(spec.test_documents, len(data))))
    source = f"{name} ({spec.hub_id}, split {split})"
    documents = from_dataset(data, spec.column, source)
    return Documents(documents.texts, source, spec.separator, spec.joined, spec.test_windows if test else None)


def _not_loaded(dataset: str, cause: Exception, no_connection: bool = False) -> RuntimeError:
    reason = " ".join(str(cause).split())[:300].rstrip(".") or type(cause).__name__
    why = f"no connection to the Hub ({reason})" if no_connection else reason
    return RuntimeError(f"Could not load the dataset {dataset}: {why}. Pass {ALTERNATIVES}.")


def check_access(spec: HubDataset, name: str, role: str) -> None:
    """Raises `RuntimeError` for a dataset that [`from_hub`] could not load; downloads nothing. Arguments: the same."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    if connection_error(spec.hub_id) is not None:
        from_hub(spec, name, role)  # of the cache
        return
    try:
        HfApi().auth_check(spec.hub_id, repo_type="dataset")
    except RepositoryNotFoundError as error:  # or one that is gated, or private
        raise _not_loaded(f"{name!r} ({spec.hub_id})", error) from error


def connection_error(hub_id: str) -> Exception | None:
    """Asks the Hub once, without the retries of a download, which last up to minutes when there is no network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(hub_id, timeout=10)
    except HfHubHTTPError:  # the Hub answered; what it refuses, load_dataset explains
        return None
    except Exception as error:
        return error
    return None


@contextmanager
def _offline_mode(enabled: bool) -> Iterator[None]:
    """Lets `datasets` use its cache only, so that what was loaded before still works without network."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or enabled
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before
