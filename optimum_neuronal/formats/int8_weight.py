"""Dense matrices in 8 bits: of every row and 128 columns a scale, of every element a level, -127 to 127. For the head and
the token embeddings, of which nothing is pruned, so that a mask would tell nothing.

A weight that was rounded so stays an ordinary one in memory; [`Int8Weight.exact`] finds its levels again, bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..sparsity.masks import Change
from .code_checks import CODED_DTYPES, GROUP, check_used_scales
from .code_scales import NEIGHBOURS
from .code_stream import BLOCK
from .codebooks import LARGEST, magnitudes
from .scale_grid import scale_range


BITS = 8  # the only ones
LEVELS, SCALES = ".packed_codes", ".packed_scales"  # what follows a weight's name in a file


@dataclass(frozen=True)
class Int8Weight(Change):
    """A matrix of 8-bit levels; as a change, it takes the place of another.

    Each element is `float32(scale) * float32(level)`, rounded to `dtype`. All tensors lie on one device.

    Args:
        levels (`Tensor`): int8, shape (rows, columns), -127 to 127.
        scales (`Tensor`): bfloat16, shape (rows, ceil(columns / 128)): positive, but 0 where all levels of a group are.
        dtype (`torch.dtype`): of the weight: float16, bfloat16 or float32.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def exact(cls, weight: torch.Tensor) -> "Int8Weight | None":
        """The levels of a matrix that [`nearest`] rounded, with which [`unpack`] gives the same bits; else `None`.

        -0.0 counts as zero. Raises `ValueError` as [`nearest`] does.
        """
        check_matrix(weight)
        found = []
        for rows in weight.detach().split(_height(weight)):
            found.append(_exact_rows(rows))
            if found[-1] is None:
                return None
        return cls._joined(found, weight)

    @classmethod
    def nearest(cls, weight: torch.Tensor) -> "Int8Weight":
        """Rounds a matrix to the nearest levels; the largest of a group's magnitudes becomes 127 times its scale.

        Args:
            weight (`Tensor`): shape (rows, columns), finite; float16, bfloat16 or float32.

        Raises:
            `ValueError`: it is no matrix, or of another dtype, or not finite.
        """
        check_matrix(weight)
        return cls._joined([_nearest_rows(rows) for rows in weight.detach().split(_height(weight))], weight)

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> "Int8Weight":
        """The levels of a matrix: exact where it has been rounded before, else the nearest."""
        return cls.exact(weight) or cls.nearest(weight)

    @classmethod
    def _joined(cls, found: list[tuple[torch.Tensor, torch.Tensor]], weight: torch.Tensor) -> "Int8Weight":
        levels, scales = (torch.cat(parts) for parts in zip(*found))
        return cls(levels, scales, weight.dtype)

    @classmethod
    def of_parts(cls, tensors: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype) -> "Int8Weight":
        """The weight of what [`Int8Weight.parts`] gave under a name."""
        return cls(tensors[name + LEVELS], tensors[name + SCALES], dtype)

    def parts(self, name: str) -> dict[str, torch.Tensor]:
        """Levels and scales, as they are recorded under a name."""
        return {name + LEVELS: self.levels, name + SCALES: self.scales}

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return tuple(self.levels.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that levels and scales take together."""
        return self.levels.nbytes + self.scales.nbytes

    def unpack(self, device: torch.device | None = None) -> torch.Tensor:
        """The weight, on the device of its levels or on another."""
        device = device or self.levels.device
        dense = torch.empty(self.shape, dtype=self.dtype, device=device)
        height = _height(dense)
        for rows, levels, scales in zip(*(part.split(height) for part in (dense, self.levels, self.scales))):
            rows.copy_(scaled(levels.to(device), scales.to(device).float()))
        return dense

    def error(self, weight: torch.Tensor) -> float:
        """Squared error as a share of the sum of squares, against the weight that was rounded; 0 where all are zero."""
        total = lost = 0.0
        height = _height(weight)
        for rows, levels, scales in zip(*(part.split(height) for part in (weight.detach(), self.levels, self.scales))):
            values = rows.float()
            total += values.square().sum(dtype=torch.float64).item()
            rounded = scaled(levels, scales.float()).to(self.dtype).float()
            lost += (rounded - values).square().sum(dtype=torch.float64).item()
        return lost / total if total else 0.0

    def check(self) -> None:
        """Raises `ValueError` if levels or scales are none that can be of a weight."""
        check_int8_headers(
            self.shape,
            self.dtype,
            [(self.levels.dtype, self.shape), (self.scales.dtype, tuple(self.scales.shape))],
        )
        bounds = scale_range(self.dtype, magnitudes(()))
        height, first = _height(self.levels), 0
        for levels, scales in zip(self.levels.split(height), self.scales.split(height)):
            if (levels == -128).any():
                raise ValueError("its codes have -128 among them, which stands for nothing")
            check_used_scales(scales, _grouped(levels).any(-1), bounds, "all its codes are", first)
            first += len(levels)

    def is_storable(self) -> bool:
        """Whether it passes [`check`]: in another dtype than it was made in, scales may be out of range."""
        try:
            self.check()
        except ValueError:
            return False
        return True

    def apply_to(self, weight: torch.Tensor) -> None:
        weight.copy_(self.unpack(weight.device))

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return self.unpack(weight.device)


def scaled(levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Levels, int8 of shape (rows, columns), times their groups' scales, float32 of shape (rows, groups): float32."""
    return levels.float() * scales.repeat_interleave(GROUP, 1)[:, : levels.shape[1]]


def int8_bytes(shape: tuple[int, int]) -> int:
    """Bytes that a matrix takes in 8 bits: its levels and its scales."""
    return shape[0] * (shape[1] + 2 * -(-shape[1] // GROUP))


def check_matrix(weight: torch.Tensor) -> None:
    """Raises `ValueError` if a weight cannot be held in 8 bits."""
    if weight.ndim != 2 or not weight.numel() or weight.dtype not in CODED_DTYPES:
        raise ValueError(
            f"a weight of shape {list(weight.shape)} and {weight.dtype} cannot be held in 8 bits: expected a matrix of one of "
            f"{', '.join(map(str, CODED_DTYPES))}"
        )
    if not all(bool(rows.isfinite().all()) for rows in weight.detach().split(_height(weight))):
        raise ValueError("a weight with NaN or infinite values cannot be held in 8 bits: mend it first")


def check_int8_headers(shape, dtype, parts) -> None:
    """Raises `ValueError` if what headers tell of a matrix in 8 bits does not agree.

    Args:
        shape: as the metadata have it.
        dtype (`torch.dtype`, *optional*): of the weight; None if it is not known.
        parts (`Sequence[tuple[torch.dtype, tuple[int, ...]]]`): dtype and shape of levels and of scales.
    """
    whole = isinstance(shape, (list, tuple)) and all(type(size) is int and size > 0 for size in shape)
    if not whole or len(shape) != 2:
        raise ValueError(f"its shape is {shape!r}: expected that of a matrix")
    if dtype not in CODED_DTYPES:
        raise ValueError(f"its dtype is {dtype}: expected one of {', '.join(map(str, CODED_DTYPES))}")
    rows, columns = shape
    expected = {
        "codes": (torch.int8, (rows, columns)),
        "scales": (torch.bfloat16, (rows, -(-columns // GROUP))),
    }
    for (name, (kind, sizes)), (found, found_shape) in zip(expected.items(), parts):
        if (found, tuple(found_shape)) != (kind, sizes):
            raise ValueError(
                f"its {name} have dtype {found} and shape {list(found_shape)}: expected {kind} and {list(sizes)} for a "
                f"matrix of shape {list(shape)}"
            )


def _height(rows: torch.Tensor) -> int:
    """How many rows are computed with at a time."""
    return max(1, BLOCK // max(1, rows.shape[1]))


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    """Shape (rows, groups, 128), 0 behind the last column."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % GROUP)).reshape(len(rows), -1, GROUP)


def _nearest_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = _grouped(rows.float())
    low, high = scale_range(rows.dtype, magnitudes(()))
    scales = (groups.abs().amax(-1) / LARGEST).clamp(low, high).bfloat16()
    return _with_scales(groups, scales, rows.shape[1])


def _exact_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """With a group's scale its largest magnitude is 127, unless the scale is the least or the largest that there is."""
    groups = _grouped(rows.float())
    low, high = scale_range(rows.dtype, magnitudes(()))
    near = (groups.abs().amax(-1) / LARGEST).bfloat16().view(torch.int16)
    found = torch.full_like(near, -1)
    for step in NEIGHBOURS:
        scales = (near + step).view(torch.bfloat16).float().clamp(low, high)
        levels = (groups / scales[..., None]).round().clamp_(-LARGEST, LARGEST)
        exact = ((levels * scales[..., None]).to(rows.dtype).float() == groups).all(-1)
        found = torch.where(exact & (found < 0), scales.bfloat16().view(torch.int16), found)
        if bool((found >= 0).all()):
            return _with_scales(groups, found.view(torch.bfloat16), rows.shape[1])
    return None


def _with_scales(groups: torch.Tensor, scales: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels, shape (rows, columns), and scales, 0 where all levels of a group are."""
    levels = (groups / scales.float()[..., None]).round().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return levels.flatten(1)[:, :columns].contiguous(), scales.masked_fill(~levels.any(-1), 0)
