"""Text datasets of the Hub by their names: those that have one of their own, as the field uses them, and all others."""

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class HubDataset:
    """Where a text dataset lies on the Hub, and how the field uses it.

    Args:
        hub_id, config, revision (`str`): as `datasets.load_dataset` takes them.
        train_split, test_split (`str`): the splits to calibrate with and to evaluate on.
        train_file, test_file (`str`): load only this file of the repository as that split.
        column (`str`, *optional*): the column that holds the text. None: see `texts.text_column`.
        separator (`str`): put between documents where they are joined.
        joined (`bool`): the documents are lines or paragraphs, and only mean something joined.
        test_documents, test_windows (`int`): evaluate on the first so many documents, and windows of them.
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
    """What a name that is none of `CALIBRATION_DATASETS` and no file's means. Raises `ValueError` if it means nothing."""
    hub_id, *parts = name.split(":")
    close = difflib.get_close_matches(hub_id.lower(), CALIBRATION_DATASETS, n=1)
    if close and "/" not in hub_id:
        raise ValueError(f"Unknown dataset {name!r}. Did you mean {close[0]!r}? Write a Hub id with its owner.")
    if len(parts) > 3 or not all(parts) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id):
        raise ValueError(
            f"The dataset {name[:80]!r} is neither a known name ({', '.join(CALIBRATION_DATASETS)}), a file that "
            "exists, nor a Hub dataset (id, id:split, id:split:column or id:config:split:column). To use a text "
            "itself, put it in a list."
        )
    config = parts.pop(0) if len(parts) == 3 else None
    spec = {"column": parts[1] if len(parts) == 2 else None}
    if parts:
        spec |= {"train_split": parts[0], "test_split": parts[0]}
    return HubDataset(hub_id, config, **spec)
