"""The layout of kernels on GPUs, on a CPU, and how kernels are found. Products with it: interpreted_triton.py."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import any_bits, bits
from profiles import examples

from optimum_neuronal.packed import grouped_weight
from optimum_neuronal.packed.grouped_weight import GroupedWeight
from optimum_neuronal.packed.packed_weight import DTYPES, PackedWeight


def test_known_layout():
    """A row starts a group; 32 slots fill one; 256 columns after its first one starts another."""
    dense = torch.zeros(4, 70_000)
    dense[0, 5:38] = torch.arange(1, 34)
    dense[2, [3, 258]] = torch.tensor([34.0, 35.0])
    dense[3, [3, 259, 69_999]] = torch.tensor([36.0, 37.0, 38.0])
    weight = GroupedWeight.from_packed(PackedWeight.pack(dense))
    assert weight.starts.tolist() == [0, 2, 2, 3, 6] and weight.base.tolist() == [5, 37, 3, 3, 259, 69_999]
    slots = torch.zeros(6, 32)
    slots[0], slots[1, 0] = torch.arange(1, 33), 33
    slots[2, :2], slots[3:, 0] = torch.tensor([34, 35]), torch.arange(36, 39)
    index = torch.zeros(6, 32, dtype=torch.uint8)
    index[0], index[2, 1] = torch.arange(32), 255
    assert torch.equal(weight.values, slots.flatten()) and torch.equal(weight.index, index.flatten())
    part = GroupedWeight.from_packed(PackedWeight.pack(dense[:, :60_000]))
    assert part.base.dtype == torch.int16 and weight.base.dtype == torch.int32, "numbers without a sign"


@examples(25)
@given(
    rows=st.integers(0, 9),
    columns=st.sampled_from([0, 1, 31, 32, 33, 255, 256, 257, 700, 66_000]),
    dtype=st.sampled_from(DTYPES),
    cast=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.002, 0.01, 0.1, 0.4, 1]),
    at_a_time=st.sampled_from([500, grouped_weight.BLOCK]),
    seed=st.integers(0, 1000),
)
def test_weights_of_any_bits_come_back(rows, columns, dtype, cast, density, at_a_time, seed):
    """Mask and values are the same, although padding has the value 0: so may kept values that were cast."""
    packed = PackedWeight.pack(any_bits((rows, columns), dtype, density, seed)).to(cast)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_weight, "BLOCK", at_a_time)
        weight = GroupedWeight.from_packed(packed)
        again = weight.packed()
    assert torch.equal(again.mask, packed.mask) and torch.equal(again.offsets, packed.offsets)
    assert torch.equal(bits(again.values), bits(packed.values)) and again.shape == packed.shape


@pytest.mark.parametrize("sparsity, bound", [(0.5, 0.79), (0.6, 0.64), (0.7, 0.48), (0.8, 0.33)])
def test_memory(sparsity, bound):
    dense = torch.randn(64, 2048).bfloat16()
    dense[torch.rand(dense.shape) < sparsity] = 0
    weight = GroupedWeight.from_packed(PackedWeight.pack(dense))
    assert weight.nbytes < bound * dense.nbytes


@pytest.fixture
def warnings(monkeypatch):
    """Return what is logged; what was found out about devices is forgotten before and after."""
    said = []
    monkeypatch.setattr(grouped_weight.logger, "warning", said.append)
    grouped_weight.find_kernels.cache_clear()
    yield said
    grouped_weight.find_kernels.cache_clear()


def find(device):
    return grouped_weight.find_kernels(torch.device(device))


@pytest.mark.parametrize("fault", ["pip install triton", "RuntimeError: Failed to find C compiler"])
def test_triton_that_is_missing_or_does_not_work(fault, monkeypatch, warnings):
    name = "optimum_neuronal.packed.triton_kernels"
    if "pip" in fault:
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, name, raising=False)
    else:
        module = type(sys)(name)
        module.try_out = lambda device: (_ for _ in ()).throw(RuntimeError("Failed to find C compiler"))
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(name, module, raising=False)
    for _ in range(2):
        assert find("cuda:0") is None
    assert len(warnings) == 1 and "cuda:0" in warnings[0] and fault in warnings[0]


def test_devices_without_kernels(monkeypatch, warnings):
    assert find("mps") is None and "there are no kernels for mps" in warnings.pop()
    monkeypatch.setenv("OPTIMUM_NEURONAL_KERNEL", "torch")
    assert find("cuda") is None and not warnings
