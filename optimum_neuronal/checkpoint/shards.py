"""Writes tensors into files of at most some bytes, a file whenever enough have come."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from .names import shard


class ShardWriter:
    """Collects tensors, and writes a file whenever enough have come.

    ```python
    with writer:
        for ...: writer.take({name: tensor})
    ```

    The files get their names when all are written; an error before that leaves none behind.

    Args:
        folder (`str` or `Path`): where the files are written; exists.
        max_shard_size (`int`): bytes of a file; what is taken together may be more.
        stem (`str`): what the files' names begin with.
    """

    def __init__(self, folder: str | Path, max_shard_size: int, stem: str):
        self.folder, self.max_shard_size, self.stem = Path(folder), max_shard_size, stem
        self._shards: list[list[str]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes = self._total = 0

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes tensors on the CPU that are to lie in one file."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._tensors and self._bytes + size > self.max_shard_size:
            self._flush()
        self._tensors |= tensors
        self._bytes += size

    def metadata(self) -> dict[str, str]:
        """What the file that is about to be written tells beside its tensors; asked once for each."""
        return {"format": "pt"}

    def finish(self, count: int, index: dict) -> None:
        """Writes what goes with so many files: their index."""
        raise NotImplementedError

    def file_name(self, number: int, count: int) -> str:
        """How a file is called: by its number, from 0, and by how many there are."""
        return shard(self.stem, number + 1, count)

    def _flush(self) -> None:
        save_file(self._tensors, self._unfinished(len(self._shards)), metadata=self.metadata())
        self._shards.append(list(self._tensors))
        self._total += self._bytes
        self._tensors, self._bytes = {}, 0

    def _unfinished(self, number: int) -> Path:
        return self.folder / f".{self.stem}-{number:05}.unfinished"

    def __enter__(self):
        return self

    def __exit__(self, error, *_) -> None:
        if error is None:
            self.close()
        else:
            for number in range(len(self._shards) + 1):
                self._unfinished(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Writes what is left, and the index."""
        if self._tensors or not self._shards:
            self._flush()
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = self.file_name(number, len(self._shards))
            self._unfinished(number).replace(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        self.finish(len(self._shards), {"metadata": {"total_size": self._total}, "weight_map": weight_map})
