"""The datasets of the literature, and what a dataset's name means."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

from ..common.validation import did_you_mean


BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # suffix -> loader of `datasets`
SHARE = re.compile(r"(.+):(0?\.\d*[1-9]\d*)")  # a dataset and its share
FILE_SUFFIXES = (".txt", ".text", ".raw", ".tokens", ".md", *BUILDERS)


@dataclass(frozen=True)
class KnownDataset:
    """Where the Hub keeps a dataset, and how the literature uses it."""

    path: str
    config: str
    train: str  # file in the configuration's folder
    test: str
    revision: str | None = None
    column: str = "text"
    separator: str = "\n\n"
    joined: bool = False  # True: documents such as lines, which make sense only together
    test_documents: int | None = None  # the most documents and windows of an evaluation
    test_windows: int | None = None
    streamed: bool = False  # True: too large to be downloaded whole, to train on it

    def download(self, split: str) -> str:
        """Return the path of the file of `"train"` or `"test"` in the Hub's cache, downloaded if it is not there."""
        where = {"repo_type": "dataset", "revision": self.revision}
        file = f"{self.config}/{self.test if split == 'test' else self.train}"
        with suppress(LocalEntryNotFoundError):
            return hf_hub_download(self.path, file, local_files_only=True, **where)
        return hf_hub_download(self.path, file, **where)


KNOWN_DATASETS = {
    "c4": KnownDataset(
        "allenai/c4",
        "en",
        train="c4-train.00000-of-01024.json.gz",
        test="c4-validation.00000-of-00008.json.gz",
        separator=" ",
        test_documents=1100,
        test_windows=256,
        streamed=True,
    ),
    "wikitext2": KnownDataset(
        "Salesforce/wikitext",
        "wikitext-2-raw-v1",
        train="train-00000-of-00001.parquet",
        test="test-00000-of-00001.parquet",
        joined=True,
    ),
    # Its repository holds a loading script, which datasets no longer runs. The Hub's conversion holds the data.
    "ptb": KnownDataset(
        "ptb-text-only/ptb_text_only",
        "penn_treebank",
        train="train/0000.parquet",
        test="test/0000.parquet",
        revision="refs/convert/parquet",
        column="sentence",
        separator=" ",
        joined=True,
    ),
}


def split_shares(datasets: Sequence[Any]) -> list[tuple[Any, float]]:
    """Return datasets without the shares after their names, such as `c4:0.8`, each with its share; equal ones if none is given.

    Raise `ValueError` unless they sum to 1.
    """
    found = [SHARE.fullmatch(one) if isinstance(one, str) else None for one in datasets]
    if not any(found):
        return [(one, 1 / len(datasets)) for one in datasets]
    parts = [(match[1], float(match[2])) for match in found if match]
    if len(parts) < len(found) or abs(sum(share for _, share in parts) - 1) > 1e-6:
        raise ValueError(
            f"The shares of the datasets {', '.join(map(str, datasets))} do not sum to 1: expected one after each name, such as "
            "c4:0.8 chat.jsonl:0.2."
        )
    return parts


def parse_name(name: str) -> tuple[str, str | None, str | None, str | None]:
    """Return a file, Hub id or known name, and its configuration, split and column, None if not given. Open nothing.

    Raise `FileNotFoundError` or `ValueError` if the name cannot be right.
    """
    if name in KNOWN_DATASETS:
        return name, None, None, None
    path, column = os.path.expanduser(name), None
    if not os.path.exists(path) and path.rpartition(":")[0].lower().endswith(FILE_SUFFIXES):
        path, _, column = path.rpartition(":")
    suffix = Path(path).suffix.lower()
    if os.path.isfile(path) and suffix in FILE_SUFFIXES:
        if column is not None and suffix not in BUILDERS:
            raise ValueError(f"{path!r} is text, which has no columns: leave out {':' + column!r}.")
        return path, None, None, column
    if os.path.exists(path) or suffix in FILE_SUFFIXES or path.startswith((".", os.sep)):
        raise FileNotFoundError(
            f"The dataset {path!r} does not exist, or is not a single file that ends in {', '.join(FILE_SUFFIXES)}. In "
            "Python, load anything else with datasets.load_dataset(...) and pass one split of it."
        )
    hub_id, *parts = name.split(":")
    hint = "" if "/" in hub_id else did_you_mean(hub_id.lower(), KNOWN_DATASETS)
    if hint or len(parts) > 3 or not all(parts) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id):
        raise ValueError(
            f"The dataset {name[:80]!r} is not a known name ({', '.join(KNOWN_DATASETS)}), a file, or a Hub dataset "
            f"(OWNER/ID, with :SPLIT, :SPLIT:COLUMN or :CONFIG:SPLIT:COLUMN).{hint} In Python, pass text itself as a list."
        )
    config = parts.pop(0) if len(parts) == 3 else None
    split, column = [*parts, None, None][:2]
    return hub_id, config, split, column
