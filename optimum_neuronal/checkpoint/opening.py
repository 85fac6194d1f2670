"""Opens a checkpoint, dense or packed, without a model, and reads its weights one after the other.

A checkpoint may come from anywhere, so nothing that its files say is believed before it was checked.
"""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from ..common.validation import check_path
from ..model.load_model import MOST_LAYERS, load_skeleton
from .names import ADAPTER_CONFIG, ADAPTER_FILES, CONFIG, DENSE_INDEX, FOREIGN_SUFFIXES, WEIGHT_FILES, is_of_weights
from .packed_reading import check_fit, check_tensors, open_checkpoint
from .safe_files import check_config_file, dense_files, read_json
from .sparsity_config import read_sparsity_config
from .stored_format import stored_format
from .stored_tensors import DTYPES, read_header
from .stored_weights import StoredWeight


LARGEST_NUMBER = 10**8  # in the config.json of a model whose shapes are compared


class Checkpoint:
    """The files in a directory. Opening them reads and checks all headers, and no weight.

    Shapes are compared with the model of config.json, which is made without weights.

    Args:
        directory (`str` or `Path`): of the checkpoint.

    Attributes:
        config (`dict`): content of config.json.
        sparsity_config (`dict`, *optional*): how it was pruned; None if it was not.
        format (`str`): `"dense"` or `"packed"`.
        files (`list[Path]`): of weights.
        weights (`list[StoredWeight]`): in the order of the files.
        adapters (`list[str]`): names of the files of an adapter in the directory, which are not read.

    Raises:
        `ValueError`: the checkpoint is damaged, names files elsewhere, or does not fit its model.
        `OSError`: a file is missing or cannot be read.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise NotADirectoryError(f"{directory} is no directory: expected one with a model's files.")
        self.config = read_json(self.directory, CONFIG)
        check_config_file(self.directory)
        self.adapters = [name for name in ADAPTER_FILES if (self.directory / name).exists()]
        try:
            self.sparsity_config = read_sparsity_config(self.config)
            self.format = stored_format(self.config, self.sparsity_config)
        except ValueError as error:
            raise ValueError(f"{self.directory / CONFIG}: {error}") from error
        if self.format == "packed":
            files = {file.path: list(file.weights.values()) for file in open_checkpoint(self.directory)}
        else:
            files = dense_weights(self.directory)
        self.files = list(files)
        self.weights = [weight for weights in files.values() for weight in weights]
        self._check_fit()

    def _check_fit(self) -> None:
        """Raise `ValueError` if weights have other shapes than in the model of config.json, as loading does.

        A model that transformers does not know, or that config.json makes absurdly large, is not compared, nor is one
        that another tool has quantized.
        """
        quantized = self.format == "dense" and self.config.get("quantization_config") is not None
        if quantized or not _is_cheap(self.config):
            return
        try:
            parameters = load_skeleton(self.directory, torch.float32, trust_remote_code=False).state_dict()
        except Exception:  # of any kind: the values of a config may be anything
            return
        # transformers leaves out tensors of dense files that the model does not have
        check_fit([w for w in self.weights if self.format == "packed" or w.name in parameters], parameters)


def _is_cheap(value: Any, key: str = "") -> bool:
    """Return False if a model of a config would have very many modules, or lists of very many numbers be made for it."""
    if isinstance(value, dict):
        return all(_is_cheap(part, str(name)) for name, part in value.items())
    if isinstance(value, list):
        return all(_is_cheap(part, key) for part in value)
    limit = MOST_LAYERS if any(part in key for part in ("layer", "expert", "label")) else LARGEST_NUMBER
    return not isinstance(value, int) or value <= limit


def dense_weights(directory: Path) -> dict[Path, list[StoredWeight]]:
    """Return the path of each file of a dense checkpoint -> its weights, by name."""
    files = {}
    for name, listed in dense_files(directory).items():
        path = directory / name
        stored, _ = read_header(path)
        if listed is not None:
            check_tensors(path, set(stored), directory / DENSE_INDEX, listed)
        files[path] = [
            StoredWeight(path, part.name, part.shape, DTYPES[part.dtype], None, (part,)) for part in stored.values()
        ]
    return files


def stored_size(directory: str | Path) -> int:
    """Return the bytes of all files of weights in a directory."""
    return sum(entry.stat().st_size for entry in Path(directory).glob("*") if is_of_weights(entry.name))


def find_checkpoint(
    directory_or_id: str | Path,
    revision: str | None = None,
    token: str | None = None,
    whole: bool = False,
    cache_dir: str | None = None,
) -> Path:
    """Return the directory of a checkpoint; download the config and weights of one on the Hub into the cache.

    Args:
        directory_or_id (`str` or `Path`): of the checkpoint.
        revision (`str`, *optional*): branch, tag or commit on the Hub. None: main.
        token (`str`, *optional*): None: the one of `hf auth login`, or HF_TOKEN.
        whole (`bool`): download all files, but for other tools' weights.
        cache_dir (`str`, *optional*): the cache. None: huggingface_hub's.

    Raises:
        `ValueError`: neither a directory nor the id of a repository.
        `OSError`: it does not exist, may not be read, or the network fails.
    """
    check_path("directory_or_id", directory_or_id)
    if Path(directory_or_id).is_dir():
        return Path(directory_or_id)
    try:
        found = snapshot_download(
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
            f"{directory_or_id} is no directory, and could not be had from the Hub: {error} If it is private, log in with "
            "`hf auth login` or set HF_TOKEN."
        ) from error
    return Path(found)
