"""Text datasets of the Hub: the names of the usual ones, and how any is loaded."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..common.validation import did_you_mean
from .texts import ALTERNATIVES, Documents, from_dataset


@dataclass(frozen=True)
class HubDataset:
    """Address of a text dataset on the Hub, and the field's way to use it.

    Args:
        hub_id, config, revision (`str`): as `datasets.load_dataset` takes them.
        train_split, test_split (`str`): the splits to calibrate with and to evaluate on.
        train_file, test_file (`str`): load only this file of the repository as that split.
        column (`str`, *optional*): the column of text. None: see [`from_dataset`].
        separator (`str`): put between documents where they are joined.
        joined (`bool`): the documents are lines or paragraphs, and only mean something joined.
        test_documents, test_windows (`int`): evaluate on at most this number of documents and windows.
    """

    hub_id: str
    config: str | None = None
    revision: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    train_file: str | None = None
    test_file: str | None = None
    column: str | None = "text"
    separator: str = "\n\n"
    joined: bool = False
    test_documents: int | None = None
    test_windows: int | None = None


CALIBRATION_DATASETS: dict[str, HubDataset] = {
    "c4": HubDataset(
        "allenai/c4",
        test_split="validation",
        train_file="en/c4-train.00000-of-01024.json.gz",
        test_file="en/c4-validation.00000-of-00008.json.gz",
        separator=" ",
        test_documents=1100,
        test_windows=256,
    ),
    "wikitext2": HubDataset("Salesforce/wikitext", "wikitext-2-raw-v1", joined=True),
    # Its own repository holds a loading script, which datasets no longer runs; the Hub's conversion holds the data.
    "ptb": HubDataset(
        "ptb-text-only/ptb_text_only",
        revision="refs/convert/parquet",
        train_file="penn_treebank/train/0000.parquet",
        test_file="penn_treebank/test/0000.parquet",
        column="sentence",
        separator=" ",
        joined=True,
    ),
}


def parse_hub_name(name: str) -> HubDataset:
    """Return the dataset of a name that is neither in `CALIBRATION_DATASETS` nor a path, or raise `ValueError`."""
    hub_id, *parts = name.split(":")
    hint = did_you_mean(hub_id.lower(), CALIBRATION_DATASETS)
    if hint and "/" not in hub_id:
        raise ValueError(f"Unknown dataset {name!r}.{hint} Write a Hub id with its owner.")
    if len(parts) > 3 or not all(parts) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id):
        raise ValueError(
            f"The dataset {name[:80]!r} is neither a known name ({', '.join(CALIBRATION_DATASETS)}), a file that "
            "exists, nor a Hub dataset (id, id:split, id:split:column or id:config:split:column). To use a text "
            "itself, put it in a list."
        )
    config = parts.pop(0) if len(parts) == 3 else None
    dataset = HubDataset(hub_id, config, column=parts[1] if len(parts) == 2 else None)
    return replace(dataset, train_split=parts[0], test_split=parts[0]) if parts else dataset


def from_hub(dataset: HubDataset, name: str, role: str, download: bool = True) -> Documents | None:
    """Load a dataset; without a connection, from the cache.

    Args:
        dataset ([`HubDataset`]): its address.
        name (`str`): the user's name for it.
        role (`"train"` or `"test"`): the split to load.
        download (`bool`): False asks the Hub, if there is a connection, whether it may be read, and returns None.

    Raises:
        `RuntimeError`: it cannot be loaded.
    """
    import datasets
    from huggingface_hub import HfApi

    test = role == "test"
    split, file = (dataset.test_split, dataset.test_file) if test else (dataset.train_split, dataset.train_file)
    options = {"data_files": {split: file} if file else None, "split": split, "revision": dataset.revision}
    no_connection = connection_error(dataset.hub_id)
    try:
        if no_connection is None and not download:
            return HfApi().auth_check(dataset.hub_id, repo_type="dataset")
        with offline_mode(no_connection is not None):
            data = datasets.load_dataset(dataset.hub_id, dataset.config, **options)
    except Exception as error:  # of many kinds: no network, no such id, config or split, gated or private, a full disk
        cause = no_connection or error
        reason = " ".join(str(cause).split())[:300].rstrip(".") or type(cause).__name__
        why = reason if no_connection is None else f"no connection to the Hub ({reason})"
        shown = f"{name!r} ({dataset.hub_id}, split {split!r})"
        raise RuntimeError(f"Could not load the dataset {shown}: {why}. Pass {ALTERNATIVES}.") from cause
    if test and dataset.test_documents:
        data = data.select(range(min(dataset.test_documents, len(data))))
    source = f"{name} ({dataset.hub_id}, split {split})"
    naming = ":".join(filter(None, [dataset.hub_id, dataset.config, split, "COLUMN"]))
    entries = from_dataset(data, dataset.column, source, naming).entries
    return Documents(entries, source, dataset.separator, dataset.joined, dataset.test_windows if test else None)


def connection_error(hub_id: str) -> Exception | None:
    """Ask the Hub once, without the retries of a download, which take minutes without a network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(hub_id, timeout=10)
    except HfHubHTTPError:  # the Hub answered; load_dataset explains what it refuses
        return None
    except Exception as error:
        return error
    return None


@contextmanager
def offline_mode(enabled: bool) -> Iterator[None]:
    """Let `datasets` use its cache alone, so that what was loaded before works without a network."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or enabled
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before
