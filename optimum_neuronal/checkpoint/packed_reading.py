"""Reads a file of a packed checkpoint (docs/format.md) as if it were a dense one, a weight at a time.

Nothing that its header says is believed before it was compared with the file's size. All errors are `ValueError`s that
name the file and the tensor.
"""

import json
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from ..runtime.schema import short
from ..sparsity.bitmask import MASK, VALUES, Values, check_headers, check_mask, checksum_seed, unpack
from ..sparsity.packed import PackedMask, PackedWeight
from .files import check_file, check_names, open_safetensors


VERSION = 1
METADATA = "neuronal"  # key in a shard's metadata

_Made = TypeVar("_Made")

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file as its header describes it.

    Args:
        name (`str`), dtype (`str`): as in the header; dtypes are called `"BF16"`, `"U8"`, ...
        shape (`tuple[int, ...]`): of the tensor.
        offset (`int`), nbytes (`int`): where its bytes lie in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class PackedFile:
    """A file of a packed checkpoint, which looks to its users as a dense one does: names, shapes and whole weights.

    Opening it reads and checks the header alone. It offers what transformers uses of `safetensors.safe_open`.

    Args:
        path (`str` or `Path`): of the file.

    Attributes:
        weights (`dict[str, StoredWeight]`): by their names in the dense checkpoint.

    Raises:
        `ValueError`: it is no such file, or it is damaged.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        stored, about = _read_header(self.path)
        self.weights: dict[str, StoredWeight] = {}
        for name, facts in about.items():
            self.weights[name] = self._weight(name, facts, stored)
        if stored:
            raise ValueError(f"{path} holds the tensor {min(stored)!r}, which its metadata does not know.")

    def _weight(self, name: str, facts: Any, stored: dict[str, Stored]) -> "StoredWeight":
        """Takes a weight's tensors out of those that are stored."""
        if not isinstance(facts, dict) or not re.fullmatch("[0-9a-f]{8}", str(facts.get("crc32"))):
            raise ValueError(
                f"{self.path}: the metadata of {name!r} is {short(facts)}: expected a 'crc32' of 8 hex digits."
            )
        checksum = int(facts["crc32"], 16)
        parts = [name] if "shape" not in facts else [name + MASK, name + VALUES]
        for part in parts:
            if part not in stored:
                raise ValueError(f"{self.path} has no tensor {part!r}, which its metadata names: it is damaged.")
        tensors = [stored.pop(part) for part in parts]
        if len(tensors) == 1:
            return StoredWeight(self.path, name, tensors[0].shape, checksum, tensors[0])
        mask, values = tensors
        try:
            check_headers(facts["shape"], mask.shape, DTYPES[mask.dtype], values.shape, DTYPES[values.dtype])
        except ValueError as error:
            raise ValueError(f"{self.path}: {name} cannot be unpacked: {error}.") from error
        return StoredWeight(self.path, name, tuple(facts["shape"]), checksum, values, mask)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are stored."""
        return sum(weight.stored_bytes for weight in self.weights.values())

    @property
    def tensors(self) -> set[str]:
        """Names of the tensors that are stored, as in the index."""
        return {part.name for weight in self.weights.values() for part in (weight.values, weight.mask) if part}

    def keys(self) -> list[str]:
        """Names of the weights, as in the dense checkpoint."""
        return list(self.weights)

    def get_slice(self, name: str) -> "StoredWeight":
        """A weight that is read when it is indexed: `file.get_slice(name)[...]`."""
        return self.weights[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """A weight, on the CPU."""
        return self.weights[name][...]

    def metadata(self) -> dict[str, str]:
        """What transformers looks for in a safetensors file."""
        return {"format": "pt"}

    def __enter__(self) -> "PackedFile":
        return self

    def __exit__(self, *_) -> None:
        """Nothing is left open between two reads."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a file: packed, if it has a mask, or as it is. Indexing reads, checks and unpacks it.

    Args:
        path (`Path`), name (`str`): of the file, and of the weight in the dense checkpoint.
        shape (`tuple[int, ...]`): of the weight.
        checksum (`int`): see docs/format.md.
        values ([`Stored`]): the kept values, or the whole tensor.
        mask ([`Stored`], *optional*): the bitmask.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    checksum: int
    values: Stored
    mask: Stored | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes in the file."""
        return self.values.nbytes + (self.mask.nbytes if self.mask else 0)

    def get_shape(self) -> list[int]:
        """The shape of the weight, unpacked."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The dtype as safetensors calls it: `"BF16"`."""
        return self.values.dtype

    def __getitem__(self, index) -> torch.Tensor:
        return self._checked(self._dense)[index]

    def read_packed(self) -> PackedWeight:
        """A packed weight as it is stored; checked as one that is unpacked."""
        return self._checked(self._packed)

    def _checked(self, make: Callable[[torch.Tensor | None, Values], _Made]) -> _Made:
        """What is made of the bitmask and of the values, which it must read from the first to the last, once."""
        with self.path.open("rb") as file:
            values = _FileValues(file, self.values, checksum_seed(self.name, self.values.dtype, self.shape))
            try:
                bitmask = None
                if self.mask is not None:
                    mask = _FileValues(file, self.mask, values.checksum)
                    bitmask = mask[0 : len(mask)]
                    values.checksum = mask.checksum
                made = make(bitmask, values)
            except ValueError as error:
                raise ValueError(f"{self.path}: {self.name} is damaged: {error}.") from error
        if values.checksum != self.checksum:
            raise ValueError(
                f"{self.path}: {self.name} is damaged: its checksum is {values.checksum:08x}, but {self.checksum:08x} "
                "was written. Download or save the checkpoint again."
            )
        return made

    def _dense(self, mask: torch.Tensor | None, values: Values) -> torch.Tensor:
        return values[0 : len(values)].view(self.shape) if mask is None else unpack(mask, values, self.shape)

    def _packed(self, mask: torch.Tensor, values: Values) -> PackedWeight:
        check_mask(mask.numpy(), math.prod(self.shape), len(values))
        return PackedWeight(PackedMask(mask, self.shape), values[0 : len(values)])


class _FileValues(Values):
    """The elements of a stored tensor in their order, read piece by piece; the checksum grows with each."""

    def __init__(self, file: BinaryIO, stored: Stored, checksum: int):
        self.dtype = DTYPES[stored.dtype]
        self.checksum = checksum
        self._file, self._stored = file, stored

    def __len__(self) -> int:
        return math.prod(self._stored.shape)

    def __getitem__(self, piece: slice) -> torch.Tensor:
        tensor = torch.empty(piece.stop - piece.start, dtype=self.dtype)
        if not len(tensor):
            return tensor
        buffer = tensor.view(torch.uint8).numpy()
        self._file.seek(self._stored.offset + piece.start * tensor.element_size())
        if self._file.readinto(buffer) != len(buffer):
            raise ValueError("the file ends in the middle of it")
        self.checksum = zlib.crc32(buffer, self.checksum)
        return tensor


def _read_header(path: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The tensors of a file by name, and what its metadata tells of every weight."""
    with open_safetensors(check_file(path.parent, path.name)):  # so that what follows may believe the header
        pass
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    try:
        about = json.loads(header.pop("__metadata__")[METADATA])
        version, weights = about["version"], about["tensors"]
        names = list(weights.items())
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no file of a packed checkpoint: its metadata lack {METADATA!r}, or it is damaged."
        ) from error
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{path} has version {short(version)} of the packed format, but this optimum_neuronal reads {VERSION}: install "
            "a newer one."
        )
    check_names(path, [*header, *weights])
    stored = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {entry['dtype']}: expected one of {', '.join(DTYPES)}.")
        first, last = entry["data_offsets"]
        stored[name] = Stored(name, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first)
    return stored, dict(names)
