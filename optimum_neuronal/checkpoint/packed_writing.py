"""Writes the files of a packed checkpoint (docs/format.md), a weight at a time."""

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..compat import transformers as internals
from ..formats.bitmask import MASK, VALUES, checksum_seed, pack, saves_space
from ..formats.code_checks import GROUP
from ..formats.coded import CodedWeight
from ..formats.int8_weight import BITS, Int8Weight
from ..formats.packed import PackedWeight
from ..formats.stand_in import StandIn
from .coded_reading import coded_seed
from .coding import Coding
from .head_coding import HeadCoding
from .int8_reading import int8_seed
from .names import CONFIG, PACKED, PACKED_INDEX
from .packed_reading import CODED_VERSION, INT8_VERSION, METADATA, VERSION
from .shards import ShardWriter
from .stored_format import HINT, QUANTIZATION_CONFIG
from .stored_tensors import DTYPES


SHARD_SIZE = "2GB"  # at most, since a file's content is held in memory until it is written

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class PackedWriter(ShardWriter):
    """Collects a checkpoint's weights, and writes a file whenever enough have come.

    ```python
    with PackedWriter(folder) as writer:
        for name, tensor in tensors:
            writer.add(name, tensor)
    ```

    An error in between leaves no file behind.

    Args:
        folder (`str` or `Path`): where the files are written; exists.
        max_shard_size (`int` or `str`):
            Bytes of a file, or text such as `"500MB"`; never more than 2 GB, but for a weight that is larger.

    Attributes:
        coding ([`Coding`], *optional*): which weights have values of few bits; set before the first is added.
        head ([`HeadCoding`], *optional*): which are in 8 bits without a mask; set as well.
    """

    def __init__(self, folder: str | Path, max_shard_size: int | str = SHARD_SIZE):
        size = min(internals.bytes_of(max_shard_size), internals.bytes_of(SHARD_SIZE))
        super().__init__(folder, size, PACKED)
        self.coding: Coding | None = None
        self.head: HeadCoding | None = None
        self._about: dict[str, Any] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor of the dense checkpoint, on any device; packs it if that saves space, unless it is packed.

        Raises:
            `ValueError`: its dtype cannot be stored.
        """
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name} has the dtype {tensor.dtype}, which a packed checkpoint cannot hold.")
        coded = self.coding and self.coding.code(name, tensor)
        if coded and coded[0].nbytes < tensor.numel() * tensor.element_size():
            self._add_coded(name, tensor, *coded)
            return
        int8 = self.head and self.head.code(name, tensor)
        if int8 and int8.nbytes < tensor.numel() * tensor.element_size():
            self._add_int8(name, int8)
            return
        facts: dict[str, Any] = {}
        packed = tensor.packed() if isinstance(tensor, StandIn) else None
        if packed is None and isinstance(tensor, StandIn):
            tensor = tensor.unpack()
        if saves_space(tensor) if packed is None else _saves_space(packed):
            mask, values = pack(tensor) if packed is None else _owned(packed.mask.bits, packed.values)
            parts = {name + MASK: mask, name + VALUES: values}
            facts["shape"] = list(tensor.shape)
        else:
            # Copied: a view would keep, and safetensors would refuse, the whole of which it is a part.
            tensor = tensor if packed is None else packed.unpack()
            parts = {name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)}
        self._take(name, parts, facts, checksum_seed(name, NAMES[tensor.dtype], tensor.shape))

    def _add_coded(self, name: str, tensor: torch.Tensor, coded: CodedWeight, transposed: bool) -> None:
        dtype, shape = NAMES[tensor.dtype], list(tensor.shape)
        facts = {"shape": shape, "bits": coded.bits, "group": GROUP, "dtype": dtype}
        facts |= {"transposed": True} if transposed else {}
        parts = coded.parts(name)
        owned = dict(zip(parts, _owned(*parts.values())))
        self._take(name, owned, facts, coded_seed(name, dtype, shape, coded.bits, transposed))

    def _add_int8(self, name: str, int8: Int8Weight) -> None:
        dtype, shape = NAMES[int8.dtype], list(int8.shape)
        parts = int8.parts(name)
        owned = dict(zip(parts, _owned(*parts.values())))
        facts = {"shape": shape, "mask": False, "bits": BITS, "group": GROUP, "dtype": dtype}
        self._take(name, owned, facts, int8_seed(name, dtype, shape))

    def tell(self) -> None:
        """Warns of weights that were to have few bits, and were left as they are."""
        for coding in (self.coding, self.head):
            if coding:
                coding.tell()

    def _take(self, name: str, parts: Mapping[str, torch.Tensor], facts: Mapping[str, Any], checksum: int) -> None:
        """Takes what a weight consists of; the checksum is that of what the header says of it."""
        for part in parts.values():
            if part.numel():
                checksum = zlib.crc32(part.view(-1).view(torch.uint8).numpy(), checksum)
        self.take(dict(parts))
        self._about[name] = {**facts, "crc32": f"{checksum:08x}"}

    def metadata(self) -> dict[str, str]:
        about, self._about = self._about, {}
        return {METADATA: json.dumps({"version": _version(self.coding, self.head), "tensors": about})}

    def finish(self, count: int, index: dict) -> None:
        (self.folder / PACKED_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _version(coding: Any, head: Any) -> int:
    """The first version of the format that has values of few bits, or a head of 8 bits, where there is any of them."""
    return CODED_VERSION if coding else INT8_VERSION if head else VERSION


def _saves_space(packed: PackedWeight) -> bool:
    return packed.nbytes < math.prod(packed.shape) * packed.values.element_size()


def _owned(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors on the CPU, with storages of their own: safetensors refuses what is a part of another."""
    return [tensor.to("cpu", copy=True) for tensor in tensors]


def packed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json of a packed checkpoint holds, made of the dense one's."""
    about = config.get("sparsity_config") or {}
    version = _version(about.get("value_bits"), about.get("embedding_bits"))
    return _with_format(config, "packed") | {"quantization_config": {**QUANTIZATION_CONFIG, "version": version}}


def dense_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json of a dense checkpoint holds, made of the packed one's."""
    packed = ("quantization_config", internals.WEIGHTS_KEY)
    return {key: value for key, value in _with_format(config, "dense").items() if key not in packed}


def add_hint(folder: Path) -> None:
    """Adds to config.json of a packed checkpoint what a process without this package will say when it loads it."""
    path = folder / CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) | {internals.WEIGHTS_KEY: HINT}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _with_format(config: Mapping[str, Any], format: str) -> dict[str, Any]:
    sparsity_config = config.get("sparsity_config")
    return {**config, "sparsity_config": {**sparsity_config, "format": format}} if sparsity_config else dict(config)
