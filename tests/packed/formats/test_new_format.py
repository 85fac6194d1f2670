"""A format with 8 bits per weight that is added here, in one class: modules, ops, records and files take it as it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from conftest import make_model
from packed_models import assert_same_state, logits
from transformers import AutoModelForCausalLM

from optimum_neuronal import save_pretrained
from optimum_neuronal.packed.formats.packed_matrix import FORMATS, PackedMatrix, register_format
from optimum_neuronal.packed.formats.sparse import of_parts, parts_of
from optimum_neuronal.packed.packed_linear import PackedLinear
from optimum_neuronal.packed.packed_module import packed_modules
from optimum_neuronal.packed.replacing import put_packed
from optimum_neuronal.packed.sparsify import finish_packing


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
    def expected_headers(cls, tensors, shape, dtype) -> dict:
        return {"eights": (torch.float8_e4m3fn, tuple(shape))}

    def check_values(self) -> None:
        if self.eights.isnan().any():
            raise ValueError("its eights are not all numbers")

    def fill(self, rows, dense) -> None:
        dense.copy_(self.eights[rows])

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
    assert torch.equal(module(x), expected) and "format=float8" in repr(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    assert torch.equal(module.float().bfloat16()(x), expected), "no conversion touches it"
    module.packed_eights = torch.full_like(module.packed_eights, 0x7F)
    with pytest.raises(ValueError, match="its eights are not all numbers"):
        module(x)


def test_records_hold_it(weight):
    tensors = parts_of(weight, weight.unpack(), "a")
    found = of_parts(tensors, "a", weight.shape, weight.dtype)
    assert isinstance(found, Float8Weight) and torch.equal(found.unpack(), weight.unpack())


def test_files_hold_it(weight, ids, tmp_path):
    """Saved and loaded without a line for it outside of its class."""
    model = make_model("llama", num_hidden_layers=1).to(torch.bfloat16)
    for name, linear in [(n, m) for n, m in model.named_modules() if n.endswith("_proj")]:
        eights = linear.weight.detach().to(torch.float8_e4m3fn)
        put_packed(model, name, Float8Weight(eights, tuple(eights.shape), torch.bfloat16))
    finish_packing(model)
    save_pretrained(model, tmp_path, format="packed")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {module.format for _, module in packed_modules(loaded)} == {"float8"}
    assert_same_state(loaded, model.state_dict())
    assert logits(loaded, ids).isfinite().all()
