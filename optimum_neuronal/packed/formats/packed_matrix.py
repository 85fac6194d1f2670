"""The base of all packed formats. A new format is a subclass of [`PackedMatrix`] in a file of this folder, and its kernels."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...common.registry import Registry
from ...model.change import Change


DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that are computed with
PREFIX = ".packed_"  # between a weight's name and a tensor's, in files
STORED = "packed_"  # precedes the name of a tensor in files and modules
BLOCK = 2**20  # elements of a weight that are looked at together, so that temporaries stay small
BLOCK_ROWS = 64  # of which blocks of rows are a multiple, as bit planes are
SCRATCH_ROWS = 1024  # unpacked at a time: so many that torch.mm is as fast as on all of them

Header = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a tensor


class PackedMatrix(Change):
    """A packed weight of shape (..., in). All dimensions but the last count rows.

    Files store its tensors, modules hold them, and kernels compute with them.

    Attributes:
        name (`str`): of the format, in files.
        names (`tuple[str, ...]`): of its tensors, in the order of ops; optional ones come last.
        optional (`tuple[str, ...]`): names of tensors that may be missing.
        derived (`tuple[str, ...]`): names of tensors that are computed from the others and are not stored.
        fixed (`Mapping[str, dtype]`): floating-point tensors that keep their dtype when a model is converted.
    """

    name: ClassVar[str]  # set by the decorator
    names: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    derived: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[Mapping[str, torch.dtype]] = {}

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    @abstractmethod
    def of_tensors(
        cls, tensors: Mapping[str, torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> "PackedMatrix":
        """Return the weight of these tensors without checks. Derived tensors may be missing."""

    @classmethod
    @abstractmethod
    def expected_headers(
        cls, tensors: Mapping[str, torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> dict[str, Header]:
        """Return dtype and shape that these tensors, and missing ones, must have. Raise `ValueError` if no weight has them."""

    @abstractmethod
    def check_values(self) -> None:
        """Raise `ValueError` unless kernels can rely on the values of the tensors, whose dtypes and shapes are right."""

    @classmethod
    def check_tensors(cls, tensors: Mapping[str, torch.Tensor], shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise `ValueError` unless tensors make a weight by their dtypes and shapes, contiguous and on one device."""
        check_shape(shape, dtype)
        if missing := [name for name in cls.names if name not in (*tensors, *cls.optional, *cls.derived)]:
            raise ValueError(f"it has no {missing[0]}")
        expected, device = cls.expected_headers(tensors, shape, dtype), tensors[cls.names[0]].device
        for name, tensor in tensors.items():
            kind, sizes = expected[name]
            if (tensor.dtype, tensor.shape) != (kind, sizes):
                came, wanted = f"dtype {tensor.dtype} and shape {list(tensor.shape)}", f"{kind} and {list(sizes)}"
                raise ValueError(f"its {name} have {came}: expected {wanted} for a weight of shape {list(shape)}")
            if tensor.device != device:
                raise ValueError(f"its {name} lie on {tensor.device}, but its {cls.names[0]} on {device}")
            if not tensor.is_contiguous():
                raise ValueError(f"its {name} are not contiguous")

    def check(self) -> None:
        """Raise `ValueError` unless all that kernels rely on holds. They check nothing themselves."""
        self.check_tensors(self.tensors(), self.shape, self.dtype)
        self.check_values()

    @abstractmethod
    def fill(self, rows: slice, dense: torch.Tensor) -> None:
        """Unpack rows, from a multiple of `BLOCK_ROWS` on, into a contiguous tensor of shape (rows of the slice, in)."""

    @abstractmethod
    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ W.T + bias`, W (rows, in), x (count, in) and bias (rows,) contiguous, of W's dtype and device."""

    @abstractmethod
    def rows(self, first: int, last: int) -> "PackedMatrix":
        """Return the rows from `first` up to `last` as a matrix, which shares tensors where the format allows."""

    def window(self, first: int, last: int) -> "PackedMatrix":
        """Return some rows to compute with, as cheaply as possible. They may share more than they need."""
        return self.rows(first, last)

    def columns(self, first: int, last: int) -> "PackedMatrix | None":
        """Return the columns from `first` up to `last` as a matrix; None if the format cannot cut there."""
        return None

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence["PackedMatrix"]) -> "PackedMatrix":
        """Concatenate rows of weights that [`join`][PackedMatrix.joins]."""

    @abstractmethod
    def joins(self, other: "PackedMatrix") -> bool:
        """Return True if rows of another weight can be appended."""

    @abstractmethod
    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> "PackedMatrix":
        """Return this weight on another device, or with another dtype."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return its tensors by name."""
        found = {name: getattr(self, name) for name in self.names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def stored(self) -> dict[str, torch.Tensor]:
        """Return what files and modules hold, `"packed_" + name` -> tensor: of a fixed dtype as uint8, which nothing casts."""
        found = {name: tensor for name, tensor in self.tensors().items() if name not in self.derived}
        return {
            STORED + name: tensor.contiguous().view(torch.uint8) if name in self.fixed else tensor
            for name, tensor in found.items()
        }

    @classmethod
    def of_stored(
        cls, tensors: Mapping[str, torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> "PackedMatrix":
        """Return the weight of stored tensors. Raise `ValueError` if their dtypes or shapes don't fit."""
        found = {name: tensors[STORED + name] for name in cls.names if tensors.get(STORED + name) is not None}
        for name in cls.fixed.keys() & found.keys():
            part, size = found[name], cls.fixed[name].itemsize
            if part.dtype != torch.uint8 or not part.ndim or part.shape[-1] % size:
                came = f"dtype {part.dtype} and shape {list(part.shape)}"
                raise ValueError(f"its {name} have {came}: expected torch.uint8, {size} bytes per number")
            found[name] = part.contiguous().view(cls.fixed[name])
        cls.check_tensors(found, shape, dtype)
        return cls.of_tensors(found, shape, dtype)

    @property
    def device(self) -> torch.device:
        return getattr(self, self.names[0]).device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def row_count(self) -> int:
        return math.prod(self.shape[:-1])

    def unpack(self) -> torch.Tensor:
        """Return the dense weight, of its shape and dtype, on the device of its tensors."""
        dense = torch.empty(self.row_count, self.shape[-1], dtype=self.dtype, device=self.device)
        self.fill(slice(0, len(dense)), dense)
        return dense.view(self.shape)

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        return self.to(weight.device, weight.dtype).unpack()


FORMATS: Registry[PackedMatrix] = Registry("packed format", __package__)
register_format = FORMATS.register


def check_shape(shape: Any, dtype: Any) -> None:
    """Raise `ValueError` unless weights of this shape and dtype, as a file has them, can be computed with."""
    sizes = shape if isinstance(shape, (list, tuple)) else ()
    if not 2 <= len(sizes) <= 8 or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"its shape is {shape!r}: expected a list of 2 to 8 whole numbers above 0")
    if dtype not in DTYPES:
        raise ValueError(f"its dtype is {dtype}: expected one of {', '.join(map(str, DTYPES))}")


def swapped(shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Return a shape with its last two sizes swapped, if `transposed`."""
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else tuple(shape)


def row_blocks(rows: int, columns: int, elements: int = BLOCK) -> Iterator[slice]:
    """Yield slices of rows that hold about `elements` elements each; all but the last are a multiple of `BLOCK_ROWS`."""
    step = max(BLOCK_ROWS, elements // max(1, columns) // BLOCK_ROWS * BLOCK_ROWS)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def multiply_by_blocks(
    x: torch.Tensor,
    rows: int,
    bias: torch.Tensor | None,
    unpack: Callable[[slice, torch.Tensor], None],
    scratch_rows: int = SCRATCH_ROWS,
) -> torch.Tensor:
    """Return `x @ W.T + bias`, x (count, columns), bias (rows,). `unpack` fills a tensor with a slice of W's rows."""
    columns = x.shape[1]
    y, scratch, wide = x.new_empty(len(x), rows), None, None
    # torch multiplies float32 four times as fast as bfloat16 with AVX2, which knows only float32.
    widens = x.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    widened = x.float() if widens else x  # x itself if it is float32
    bias = None if bias is None else bias.to(widened.dtype)
    for block in row_blocks(rows, columns, scratch_rows * columns):
        count = block.stop - block.start
        scratch = x.new_empty(count, columns) if scratch is None else scratch[:count]
        unpack(block, scratch)
        if widened is x:
            weight, out = scratch, y[:, block]
        else:
            wide = scratch.float() if wide is None else wide[:count].copy_(scratch)
            weight, out = wide, widened.new_empty(len(x), count)
        if bias is None:
            torch.mm(widened, weight.t(), out=out)
        else:
            torch.addmm(bias[block], widened, weight.t(), out=out)
        if widened is not x:
            y[:, block] = out
    return y
