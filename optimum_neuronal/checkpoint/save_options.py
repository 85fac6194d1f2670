"""`SaveOptions`: how a model is written."""

from dataclasses import dataclass

import torch

from ..common.validation import check_choice
from ..packed.packed_weight import DTYPES
from .names import FORMATS


SHARD_SIZE = "50GB"  # as in transformers


@dataclass(frozen=True)
class SaveOptions:
    """How a model is written. Checked when made.

    Args:
        format (`str`, *optional*): `"dense"` or `"packed"`. None: packed if the model computes with packed weights.
        dtype (`torch.dtype`, *optional*): of the files. None: the model's.
        max_shard_size (`int` or `str`): bytes of a file of weights, or text such as `"500MB"`.

    Raises:
        `TypeError`, `ValueError`: the format is unknown or does not support the dtype.
    """

    format: str | None = None
    dtype: torch.dtype | None = None
    max_shard_size: int | str = SHARD_SIZE

    def __post_init__(self) -> None:
        if self.format is not None:
            check_choice("format", self.format, FORMATS)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise TypeError(
                f"The dtype to save in is {self.dtype!r}: expected a floating-point one, such as torch.bfloat16."
            )
        if self.format == "packed" and self.dtype not in (None, *DTYPES):
            raise ValueError(
                f"The packed format does not support {self.dtype}: expected one of {', '.join(map(str, DTYPES))}."
            )
