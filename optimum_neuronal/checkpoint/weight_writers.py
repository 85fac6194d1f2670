"""Writes the weights of a checkpoint into files of at most some bytes, dense or packed (docs/format.md)."""

import json
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..compat import hf_private
from ..packed.formats.packed_matrix import PackedMatrix, swapped
from ..packed.formats.quantized import QuantizedWeight
from ..packed.formats.sparse import SparseWeight, count_kept, sparse_bytes
from ..packed.formats.stand_in import StandIn
from .names import DENSE, INDEX_SUFFIX, PACKED, SUFFIX, shard
from .packed_reading import METADATA
from .stored_format import VERSION, write_json
from .stored_tensors import DTYPE_NAMES, checksum_seed
from .stored_weights import packed_seed


SHARD_SIZE = "2GB"  # at most, since a file's content is held in memory until it is written


class DenseWriter:
    """Writes a checkpoint's weights dense: a file whenever enough have come, named as transformers names them.

    ```python
    with writer:
        for ...: writer.add(name, tensor)
    ```

    The files get their names when all are written. (huggingface_hub's helpers divide tensors whose sizes are known
    beforehand; sizes of packed weights are not.)

    Args:
        folder (`str` or `Path`): where the files are written; exists.
        max_shard_size (`int` or `str`): bytes of a file, or text such as `"500MB"`; one weight may be larger.
    """

    stem = DENSE  # beginning of the files' names
    has_index = False  # also of a single file

    def __init__(self, folder: str | Path, max_shard_size: int | str = SHARD_SIZE):
        self.folder, self.max_shard_size = Path(folder), hf_private.bytes_of(max_shard_size)
        self._shards: list[list[str]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes = self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor, on any device; unpack it if it is packed."""
        self._take(_owned({name: tensor.unpack() if isinstance(tensor, StandIn) else tensor}))

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors on the CPU that are to lie in one file."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._tensors and self._bytes + size > self.max_shard_size:
            self._flush()
        self._tensors |= tensors
        self._bytes += size

    def _metadata(self) -> dict[str, str]:
        """Return the metadata of the file that is about to be written; called once for each file."""
        return {"format": "pt"}

    def _flush(self) -> None:
        save_file(self._tensors, self._unfinished(len(self._shards)), metadata=self._metadata())
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

    def close(self) -> None:
        """Write what is left, and the index."""
        if self._tensors or not self._shards:
            self._flush()
        weight_map, count = {}, len(self._shards)
        has_index = count > 1 or self.has_index
        for number, names in enumerate(self._shards):
            file = shard(self.stem, number + 1, count) if has_index else self.stem + SUFFIX
            self._unfinished(number).replace(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        if has_index:
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            write_json(self.folder / f"{self.stem}{INDEX_SUFFIX}", index)


class PackedWriter(DenseWriter):
    """Writes a checkpoint's weights packed.

    Args:
        folder (`str` or `Path`): where the files are written; exists.
        max_shard_size (`int` or `str`): as for [`DenseWriter`]; a file has never more than 2 GB.
        rounded (`Collection[str]`): names of weights that are rounded to 8 bits, unless they are quantised.

    Attributes:
        quantized (`bool`): True if a weight of few bits was added.
    """

    stem, has_index = PACKED, True

    def __init__(self, folder: str | Path, max_shard_size: int | str = SHARD_SIZE, rounded: Collection[str] = ()):
        super().__init__(folder, min(hf_private.bytes_of(max_shard_size), hf_private.bytes_of(SHARD_SIZE)))
        self.quantized, self._rounded = False, rounded
        self._about: dict[str, Any] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor of the dense checkpoint, on any device; pack it if that saves space. Quantised weights stay so.

        Raises:
            `ValueError`: its dtype cannot be stored, or it is to be rounded and is not finite.
        """
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} has the dtype {tensor.dtype}, which a packed checkpoint cannot hold.")
        packed, transposed = _packed(name, tensor, name in self._rounded)
        if packed is not None:
            self.add_packed(name, packed, transposed)
            return
        dense = tensor.unpack() if isinstance(tensor, StandIn) else tensor
        self._add(name, {name: dense}, {}, checksum_seed(name, DTYPE_NAMES[tensor.dtype], tensor.shape))

    def add_packed(self, name: str, weight: PackedMatrix, transposed: bool = False) -> None:
        """Take a packed weight, of which the dense checkpoint's has the last two dimensions swapped if `transposed`."""
        dtype, shape = DTYPE_NAMES[weight.dtype], swapped(weight.shape, transposed)
        facts = {"format": weight.name, "shape": shape, "dtype": dtype, **({"transposed": True} if transposed else {})}
        self.quantized |= isinstance(weight, QuantizedWeight)
        self._add(name, weight.parts(name), facts, packed_seed(name, dtype, shape, weight.name, transposed))

    def _add(self, name: str, parts: Mapping[str, torch.Tensor], facts: Mapping[str, Any], checksum: int) -> None:
        owned = _owned(parts)
        for part in owned.values():
            if part.numel():
                checksum = zlib.crc32(part.view(-1).view(torch.uint8).numpy(), checksum)
        self._take(owned)
        self._about[name] = {**facts, "crc32": f"{checksum:08x}"}

    def _metadata(self) -> dict[str, str]:
        about, self._about = self._about, {}
        return {METADATA: json.dumps({"version": VERSION, "tensors": about})}


def _packed(name: str, tensor: torch.Tensor, rounded: bool) -> tuple[PackedMatrix | None, bool]:
    """Return a tensor as it is stored packed, and True if that has its last two dimensions swapped; None if it is dense."""
    if isinstance(tensor, StandIn):
        packed, transposed = tensor.stored()
        if isinstance(packed, QuantizedWeight):  # whatever its size: dense, its codes would be lost
            return packed, transposed
        # Equal models give equal files, however they are held: a change of dtype may have made values zero.
        if (
            not (transposed or rounded)
            and isinstance(packed, SparseWeight)
            and count_kept(packed.values) == packed.kept
        ):
            return (packed if _pays(tensor, packed.kept) else None), False
        tensor = tensor.unpack()
    if rounded:
        try:
            return QuantizedWeight.nearest(tensor), False
        except ValueError as error:
            raise ValueError(f"{name} cannot be rounded to 8 bits: {error}.") from error
    if tensor.ndim < 2 or not tensor.is_floating_point() or not _pays(tensor, count_kept(tensor)):
        return None, False
    return SparseWeight.pack(tensor), False


def _pays(tensor: torch.Tensor, kept: int) -> bool:
    """Return True if a tensor with so many elements to keep takes fewer bytes as a sparse weight."""
    return sparse_bytes(tensor.shape, kept, tensor.element_size()) < tensor.numel() * tensor.element_size()


def _owned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies on the CPU: a view would keep, and safetensors would refuse, the whole of which it is a part."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
