"""A format of eight bits a weight that is added here, in one class: modules, ops and files take it as it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from optimum_neuronal.checkpoint.packed_reading import PackedFile
from optimum_neuronal.checkpoint.weight_writers import PackedWriter
from optimum_neuronal.packed.formats.packed_matrix import (
    FORMATS,
    PackedMatrix,
    check_shape,
    check_tensors,
    headers_of,
    register_format,
)
from optimum_neuronal.packed.packed_linear import PackedLinear


@dataclass(frozen=True)
class Float8Weight(PackedMatrix):
    names: ClassVar[tuple[str, ...]] = ("eights",)
    fixed: ClassVar[Mapping[str, torch.dtype]] = {"eights": torch.float8_e4m3fn}

    eights: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of_tensors(cls, tensors, shape, dtype) -> "Float8Weight":
        return cls(tensors["eights"], tuple(shape), dtype)

    @classmethod
    def check_headers(cls, shape, dtype, headers) -> None:
        check_shape(shape, dtype)
        check_tensors(headers, {"eights": (torch.float8_e4m3fn, tuple(shape))}, shape)

    def check(self) -> None:
        self.check_headers(self.shape, self.dtype, headers_of(self.tensors()))
        if self.eights.isnan().any():
            raise ValueError("its eights are not all numbers")

    def unpack(self) -> torch.Tensor:
        return self.eights.to(self.dtype)

    def linear(self, x, bias=None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.unpack(), bias)

    def rows(self, first, last) -> "Float8Weight":
        return replace(self, eights=self.eights[first:last], shape=(last - first, self.shape[-1]))

    @classmethod
    def joined(cls, parts: Sequence["Float8Weight"]) -> "Float8Weight":
        eights = torch.cat([part.eights for part in parts])
        return cls(eights, tuple(eights.shape), parts[0].dtype)

    def joins(self, other) -> bool:
        return self.shape[-1] == other.shape[-1]

    def to(self, device=None, dtype=None) -> "Float8Weight":
        return replace(self, eights=self.eights.to(device=device), dtype=dtype or self.dtype)

    @property
    def kept(self) -> int:
        return self.eights.numel()

    def describe(self) -> str:
        return "eight bits"


@pytest.fixture
def weight(monkeypatch):
    FORMATS.names()  # all that there are
    monkeypatch.setattr(FORMATS, "_classes", dict(FORMATS._classes))
    register_format("float8")(Float8Weight)
    dense = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    return Float8Weight(dense, (6, 10), torch.bfloat16)


def test_modules_compute_with_it(weight):
    module, x = PackedLinear(weight).eval(), torch.randn(3, 10).bfloat16()
    expected = torch.nn.functional.linear(x, weight.unpack())
    assert torch.equal(module(x), expected) and "eight bits" in repr(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    assert torch.equal(module.float().bfloat16()(x), expected), "no conversion touches it"
    state = module.state_dict()
    state["eights"] = torch.full_like(state["eights"], 0x7F)
    with pytest.raises(RuntimeError, match="its eights are not all numbers"):
        module.load_state_dict(state)
    assert torch.equal(module.to_linear().weight, weight.unpack())


def test_files_hold_it(weight, tmp_path):
    with PackedWriter(tmp_path) as writer:
        writer.add_packed("a.weight", weight)
        writer.add_packed("b.weight", weight, transposed=True)
    file = PackedFile.open(next(tmp_path.glob("*.safetensors")))
    assert torch.equal(file.get_tensor("a.weight"), weight.unpack())
    assert torch.equal(file.get_tensor("b.weight"), weight.unpack().T)
    assert file.tensors == {"a.weight.packed_eights", "b.weight.packed_eights"}
    assert isinstance(file.weights["a.weight"].read_packed(), Float8Weight)
