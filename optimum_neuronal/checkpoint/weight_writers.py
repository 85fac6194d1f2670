"""Writes the weights of a checkpoint into files of at most some bytes, dense or packed (docs/format.md)."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..compat import transformers as internals
from ..formats.bitmask import MASK, VALUES, checksum_seed, pack, saves_space
from ..formats.code_checks import GROUP
from ..formats.int8_weight import BITS
from ..formats.stand_in import StandIn
from .coding import Coding, HeadCoding
from .names import DENSE, DENSE_FILE, DENSE_INDEX, PACKED, PACKED_INDEX, shard
from .packed_reading import METADATA
from .stored_format import VERSION
from .stored_tensors import DTYPE_NAMES
from .stored_weights import coded_seed, int8_seed


SHARD_SIZE = "2GB"  # at most, since a file's content is held in memory until it is written
Parts = tuple[
    dict[str, torch.Tensor], dict[str, Any], int
]  # tensors by name, metadata, CRC-32 of what both say of the weight


class ShardWriter:
    """Collects tensors, and writes a file whenever enough have come.

    ```python
    with writer:
        for ...: writer.take({name: tensor})
    ```

    The files get their names when all are written; an error before that leaves none behind. (huggingface_hub's helpers
    divide tensors whose sizes are known beforehand; those of packed weights are not.)

    Args:
        folder (`str` or `Path`): where the files are written; exists.
        max_shard_size (`int`): bytes of a file; what is taken together may be more.
        stem (`str`): beginning of the files' names.
    """

    def __init__(self, folder: str | Path, max_shard_size: int, stem: str):
        self.folder, self.max_shard_size, self.stem = Path(folder), max_shard_size, stem
        self._shards: list[list[str]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes = self._total = 0

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors on the CPU that are to lie in one file."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._tensors and self._bytes + size > self.max_shard_size:
            self._flush()
        self._tensors |= tensors
        self._bytes += size

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the file that is about to be written; called once for each file."""
        return {"format": "pt"}

    def file_name(self, number: int, count: int) -> str:
        """Return the name of a file, by its number, from 1, and the count of files."""
        return shard(self.stem, number, count)

    def write_index(self, index: dict, count: int) -> None:
        """Write the index of so many files."""
        raise NotImplementedError

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
        """Write what is left, and the index."""
        if self._tensors or not self._shards:
            self._flush()
        weight_map, count = {}, len(self._shards)
        for number, names in enumerate(self._shards):
            file = self.file_name(number + 1, count)
            self._unfinished(number).replace(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        self.write_index({"metadata": {"total_size": self._total}, "weight_map": weight_map}, count)


class DenseWriter(ShardWriter):
    """Writes a checkpoint's weights dense, into files that are named as transformers names them.

    Args:
        folder (`Path`): where the files are written; exists.
        max_shard_size (`int`): bytes of a file; one weight may be larger.
    """

    def __init__(self, folder: Path, max_shard_size: int):
        super().__init__(folder, max_shard_size, DENSE)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor on the CPU."""
        self.take({name: tensor})

    def file_name(self, number: int, count: int) -> str:
        return DENSE_FILE if count == 1 else super().file_name(number, count)

    def write_index(self, index: dict, count: int) -> None:
        if count > 1:
            write_json(self.folder / DENSE_INDEX, index)


class PackedWriter(ShardWriter):
    """Writes a checkpoint's weights packed.

    Args:
        folder (`str` or `Path`): where the files are written; exists.
        max_shard_size (`int` or `str`):
            Bytes of a file, or text such as `"500MB"`; never more than 2 GB, but for a weight that is larger.

    Attributes:
        coding ([`Coding`], *optional*): of the weights with quantised values; set before the first is added.
        head ([`HeadCoding`], *optional*): of the weights in 8 bits without a mask; set as well.
    """

    def __init__(self, folder: str | Path, max_shard_size: int | str = SHARD_SIZE):
        size = min(internals.bytes_of(max_shard_size), internals.bytes_of(SHARD_SIZE))
        super().__init__(folder, size, PACKED)
        self.coding: Coding | None = None
        self.head: HeadCoding | None = None
        self._about: dict[str, Any] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor of the dense checkpoint, on any device; pack it if that saves space, unless it is packed.

        Raises:
            `ValueError`: its dtype cannot be stored.
        """
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} has the dtype {tensor.dtype}, which a packed checkpoint cannot hold.")
        parts, facts, checksum = self._quantised(name, tensor) or _exact(name, tensor)
        for part in parts.values():
            if part.numel():
                checksum = zlib.crc32(part.view(-1).view(torch.uint8).numpy(), checksum)
        self.take(parts)
        self._about[name] = {**facts, "crc32": f"{checksum:08x}"}

    def _quantised(self, name: str, tensor: torch.Tensor) -> Parts | None:
        """Return the parts of a weight with quantised values; None if it has none, or is not smaller with them."""
        dtype, shape, size = DTYPE_NAMES[tensor.dtype], list(tensor.shape), tensor.numel() * tensor.element_size()
        about = {"group": GROUP, "dtype": dtype}
        coded = self.coding and self.coding.code(name, tensor)
        if coded and coded[0].nbytes < size:
            weight, transposed = coded
            facts = {"shape": shape, "bits": weight.bits, **about, **({"transposed": True} if transposed else {})}
            return _owned(weight.parts(name)), facts, coded_seed(name, dtype, shape, weight.bits, transposed)
        int8 = self.head and self.head.code(name, tensor)
        if int8 and int8.nbytes < size:
            facts = {"shape": shape, "mask": False, "bits": BITS, **about}
            return _owned(int8.parts(name)), facts, int8_seed(name, dtype, shape)
        return None

    def warn(self) -> None:
        """Warn of weights that were to have quantised values, and were left as they are."""
        for coding in (self.coding, self.head):
            if coding:
                coding.warn()

    def metadata(self) -> dict[str, str]:
        about, self._about = self._about, {}
        return {METADATA: json.dumps({"version": VERSION, "tensors": about})}

    def write_index(self, index: dict, count: int) -> None:
        write_json(self.folder / PACKED_INDEX, index)


def _exact(name: str, tensor: torch.Tensor) -> Parts:
    """Return the parts of a weight with values as they are: a bitmask and values if that saves space, else the tensor."""
    seed = checksum_seed(name, DTYPE_NAMES[tensor.dtype], tensor.shape)
    packed = tensor.packed() if isinstance(tensor, StandIn) else None
    if packed is not None and packed.nbytes < tensor.numel() * tensor.element_size():
        parts = {name + MASK: packed.mask.bits, name + VALUES: packed.values}
        return _owned(parts), {"shape": list(tensor.shape)}, seed
    if isinstance(tensor, StandIn):
        tensor = tensor.unpack()
    if saves_space(tensor):
        mask, values = pack(tensor)
        return {name + MASK: mask, name + VALUES: values}, {"shape": list(tensor.shape)}, seed
    return _owned({name: tensor}), {}, seed


def _owned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies on the CPU: a view would keep, and safetensors would refuse, the whole of which it is a part."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def write_json(path: Path, value: Mapping) -> None:
    """Write a JSON file, its keys in order."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
