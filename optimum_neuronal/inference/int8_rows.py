"""The layout of a dense matrix in 8 bits, as the kernels read it: that of the token embeddings and of the head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..formats.int8_weight import GROUP, Int8Weight, scaled
from .bit_rows import check_tensors, row_blocks
from .int8_ops import int8_linear, unpack_int8


UNMASKED = "unmasked "  # what the kind of this layout begins with; how inputs are multiplied follows


@dataclass(frozen=True)
class Int8Rows:
    """A dense matrix of shape (out, in) of 8-bit levels; all tensors lie on one device.

    Args:
        levels (`Tensor`): int8, shape (out, in), -127 to 127.
        scales (`Tensor`): int16, shape (out, ceil(in / 128)): the bits of bfloat16 numbers, which nothing shall convert
            to another dtype.
        like (`Tensor`): shape (0,), of the weight's dtype, in which results are.
        shape (`tuple[int, int]`): (out, in).
        activations (`str`): `"int8"` or `"bf16"`: how inputs are multiplied.
        rounded (`torch.dtype`, *optional*): to which elements are rounded before they become the weight's dtype: that of
            the file, so that each reader finds the same numbers in each dtype. None: the weight's.
    """

    names: ClassVar[tuple[str, ...]] = ("levels", "scales", "like")
    value_bits: ClassVar[int] = 8

    levels: torch.Tensor
    scales: torch.Tensor
    like: torch.Tensor
    shape: tuple[int, int]
    activations: str = "int8"
    rounded: torch.dtype | None = None

    @classmethod
    def of(cls, int8: Int8Weight, activations: str = "int8") -> "Int8Rows":
        """Lays a matrix in 8 bits out for the kernels, on its device; all is shared.

        Raises:
            `ValueError`: its levels and scales disagree.
        """
        like = torch.empty(0, dtype=int8.dtype, device=int8.levels.device)
        scales = int8.scales.contiguous().view(torch.int16)
        rows = cls(int8.levels.contiguous(), scales, like, tuple(int8.shape), activations, int8.dtype)
        rows.check()
        return rows

    def to_packed(self) -> Int8Weight:
        """The weight as files hold it, shared."""
        return Int8Weight(self.levels, self.scales.view(torch.bfloat16), self.rounded or self.dtype)

    @property
    def kind(self) -> str:
        """Name among the layouts, see `layouts`."""
        return UNMASKED + self.activations

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        """On which all tensors lie."""
        return self.like.device

    @property
    def kept(self) -> int:
        """How many elements are kept: all."""
        return self.levels.numel()

    @property
    def nbytes(self) -> int:
        """Bytes that all tensors take together."""
        return self.levels.nbytes + self.scales.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ W.T + bias`, see [`int8_linear`]."""
        return int8_linear(x, self.levels, self.scales, bias, self.activations == "int8")

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows, no others being unpacked: shape (*ids.shape, in), of the weight's dtype."""
        flat = ids.reshape(-1)
        scales = self.scales.index_select(0, flat).view(torch.bfloat16).float()
        found = scaled(self.levels.index_select(0, flat), scales).to(self.rounded or self.dtype)
        return found.to(self.dtype).view(*ids.shape, self.shape[1])

    def unpack(self) -> torch.Tensor:
        """The dense matrix: scales times levels, rounded, of the weight's dtype."""
        return unpack_int8(self.levels, self.scales, self.rounded or self.dtype).to(self.dtype)

    def converted(self, device: torch.device | None, dtype: torch.dtype | None) -> "Int8Rows":
        """These rows on another device, or of another dtype, in which scales and levels stay as they are."""
        tensors = {name: getattr(self, name).to(device=device) for name in self.names}
        return replace(self, **tensors | {"like": tensors["like"].to(dtype)})

    def window(self, first: int, last: int) -> "Int8Rows":
        """The rows from `first` on, up to `last`; shared."""
        levels, scales = self.levels[first:last], self.scales[first:last]
        return replace(self, levels=levels, scales=scales, shape=(last - first, self.shape[1]))

    part = window

    def joins(self, other: "Int8Rows") -> bool:
        """Whether rows of another weight can follow these."""
        mine = (self.shape[1], self.dtype, self.rounded, self.device, self.activations)
        return mine == (other.shape[1], other.dtype, other.rounded, other.device, other.activations)

    @classmethod
    def joined(cls, parts: Sequence["Int8Rows"]) -> "Int8Rows":
        """The rows of all parts, one after the other; a single part is shared, several are copied."""
        if len(parts) == 1:
            return parts[0]
        levels, scales = (torch.cat([getattr(rows, name) for rows in parts]) for name in ("levels", "scales"))
        return replace(parts[0], levels=levels, scales=scales, shape=(len(levels), parts[0].shape[1]))

    def check(self) -> None:
        """Raises `ValueError` if the tensors disagree: kernels believe what they say."""
        rows, columns = self.shape
        expected = {
            "levels": (torch.int8, (rows, columns)),
            "scales": (torch.int16, (rows, -(-columns // GROUP))),
        }
        check_tensors({name: getattr(self, name) for name in expected}, expected, self.shape)
        if any(bool((self.levels[block] == -128).any()) for block in row_blocks(rows, columns)):
            raise ValueError("its levels have -128 among them, which stands for nothing")
        if not bool(self.scales.view(torch.bfloat16).isfinite().all()):
            raise ValueError("its scales are not all finite")
