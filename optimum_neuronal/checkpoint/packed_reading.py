"""Reads a file of a packed checkpoint (docs/format.md) as if it were a dense one, a weight at a time.

Nothing that its header says is believed before it was compared with the file's size. All errors are `ValueError`s that
name the file and the tensor.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..formats.bitmask import MASK, VALUES, Values, check_headers, check_mask, checksum_seed, unpack
from ..formats.packed import PackedMask, PackedWeight
from .coded_reading import CODED_PARTS, StoredCodedWeight
from .files import check_file, check_names, open_safetensors
from .int8_reading import INT8_PARTS, StoredInt8Weight
from .schema import short
from .stored_tensors import DTYPES, FileValues, Stored


# Versions of the format: the second has weights without a mask in 8 bits beside all of the first, and weights with values
# of few bits; the third these with scales of 8 bits, too.
VERSION, INT8_VERSION, CODED_VERSION = VERSIONS = (1, 2, 3)
METADATA = "neuronal"  # key in a shard's metadata

_Made = TypeVar("_Made")


class PackedFile:
    """A file of a packed checkpoint, which looks to its users as a dense one does: names, shapes and whole weights.

    Opening it reads and checks the header alone. It offers what transformers uses of `safetensors.safe_open`.

    Args:
        path (`str` or `Path`): of the file.

    Attributes:
        weights (`dict[str, AnyStored]`): by their names in the dense checkpoint.

    Raises:
        `ValueError`: it is no such file, or it is damaged.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        stored, about, version = _read_header(self.path)
        self.weights: dict[str, AnyStored] = {}
        for name, facts in about.items():
            self.weights[name] = self._weight(name, facts, stored, version)
        if stored:
            raise ValueError(f"{path} holds the tensor {min(stored)!r}, which its metadata does not know.")

    def _weight(self, name: str, facts: Any, stored: dict[str, Stored], version: int) -> "AnyStored":
        """Takes a weight's tensors out of those that are stored."""
        if not isinstance(facts, dict) or not re.fullmatch("[0-9a-f]{8}", str(facts.get("crc32"))):
            raise ValueError(
                f"{self.path}: the metadata of {name!r} is {short(facts)}: expected a 'crc32' of 8 hex digits."
            )
        checksum = int(facts["crc32"], 16)
        coded = "bits" in facts and version >= INT8_VERSION
        kind: Any = StoredInt8Weight if "mask" in facts else StoredCodedWeight
        of_codes = INT8_PARTS if kind is StoredInt8Weight else CODED_PARTS
        ends = of_codes if coded else (MASK, VALUES) if "shape" in facts else ("",)
        for end in ends:
            if name + end not in stored:
                raise ValueError(f"{self.path} has no tensor {name + end!r}, which its metadata names: it is damaged.")
        tensors = [stored.pop(name + end) for end in ends]
        if len(tensors) == 1:
            return StoredWeight(self.path, name, tensors[0].shape, checksum, tensors[0])
        try:
            if coded:
                return kind.of_header(self.path, name, facts, tensors, checksum)
            mask, values = tensors
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
        return {part.name for weight in self.weights.values() for part in weight.parts}

    def keys(self) -> list[str]:
        """Names of the weights, as in the dense checkpoint."""
        return list(self.weights)

    def get_slice(self, name: str) -> "AnyStored":
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
    def parts(self) -> list[Stored]:
        """The tensors that it consists of."""
        return [self.values] if self.mask is None else [self.mask, self.values]

    @property
    def stored_bytes(self) -> int:
        """Bytes that it takes in the file."""
        return sum(part.nbytes for part in self.parts)

    @property
    def kept(self) -> int | None:
        """How many elements are kept, None if it is not packed."""
        return None if self.mask is None else math.prod(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return DTYPES[self.values.dtype]

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
            values = FileValues(file, self.values, checksum_seed(self.name, self.values.dtype, self.shape))
            try:
                bitmask = None
                if self.mask is not None:
                    mask = FileValues(file, self.mask, values.checksum)
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


AnyStored = StoredWeight | StoredCodedWeight | StoredInt8Weight


def _read_header(path: Path) -> tuple[dict[str, Stored], dict[str, Any], int]:
    """The tensors of a file by name, what its metadata tells of every weight, and the version of the format."""
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
    if type(version) is not int or version not in VERSIONS:
        raise ValueError(
            f"{path} has version {short(version)} of the packed format, but this optimum_neuronal reads "
            f"{VERSIONS[0]} to {VERSIONS[-1]}: install a newer one."
        )
    check_names(path, [*header, *weights])
    stored = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {entry['dtype']}: expected one of {', '.join(DTYPES)}.")
        first, last = entry["data_offsets"]
        stored[name] = Stored(name, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first)
    return stored, dict(names), version
