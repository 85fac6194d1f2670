import sys

import pytest
import torch
from weights import bits, finite, packed, sparse

from optimum_neuronal.formats.bitmask import INTEGERS
from optimum_neuronal.inference import accelerator, ops, torch_fallback
from optimum_neuronal.inference.bit_rows import unpack_bits
from optimum_neuronal.inference.packed_rows import DTYPES


@pytest.fixture(autouse=True)
def warnings(monkeypatch):
    """What is logged; and what was found out about devices is forgotten before and after."""
    said = []
    monkeypatch.setattr(accelerator.logger, "warning", said.append)
    accelerator.kernels.cache_clear()
    yield said
    accelerator.kernels.cache_clear()


def test_without_triton(monkeypatch, warnings):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "optimum_neuronal.inference.triton_kernels", raising=False)
    for _ in range(2):
        assert accelerator.kernels(torch.device("cuda", 0)) is torch_fallback
    assert len(warnings) == 1 and "cuda:0" in warnings[0] and "pip install triton" in warnings[0]


def test_triton_that_does_not_work(monkeypatch, warnings):
    module = type(sys)("optimum_neuronal.inference.triton_kernels")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("optimum_neuronal.inference.triton_kernels", module, raising=False)

    def fail(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(accelerator, "_try", fail)
    assert accelerator.kernels(torch.device("cuda", 1)) is torch_fallback
    assert len(warnings) == 1 and "RuntimeError: Failed to find C compiler" in warnings[0]


def test_devices_that_triton_does_not_know(warnings):
    assert accelerator.kernels(torch.device("mps")) is torch_fallback
    assert "there are none for mps" in warnings[0]


def test_torch_can_be_forced(monkeypatch, warnings):
    monkeypatch.setenv("OPTIMUM_NEURONAL_KERNEL", "torch")
    assert accelerator.kernels(torch.device("cuda")) is torch_fallback and not warnings


def test_the_way_of_devices_is_bit_equal():
    for dtype in DTYPES:
        weight = sparse((19, 77), dtype)
        mask, values, offsets = packed(weight)
        dense = torch.full((8, 77), 7, dtype=INTEGERS[dtype.itemsize])
        torch_fallback._spread(bits(values), offsets[5:14], unpack_bits(mask[5:13], 77), dense)
        assert torch.equal(dense, bits(weight[5:13]))


def test_a_weight_without_columns():
    x, bias = torch.ones(2, 3, 0), torch.arange(4.0)
    assert torch.equal(torch_fallback.packed_linear(x, *packed(torch.ones(4, 0)), bias), bias.expand(2, 3, 4))


def test_no_number_is_fetched_from_a_device(monkeypatch):
    """Tensors without data stand for a device's: whatever asks for a number fails."""
    monkeypatch.setattr(torch_fallback, "SCRATCH", 8 * 70)
    x, *parts = (tensor.to("meta") for tensor in (torch.ones(2, 70), *packed(finite((20, 70), torch.float32))))
    assert accelerator.packed_linear(x, *parts, None).shape == (2, 20)
    assert accelerator.unpack_rows(*parts, 70).shape == (20, 70)


def test_devices_without_data_get_shapes():
    """As torch.compile traces a model that lies on a GPU: nothing is computed, and no kernel is chosen."""
    with torch._subclasses.FakeTensorMode():
        mask = torch.empty(6, 8, dtype=torch.uint8, device="cuda")
        offsets = torch.empty(7, dtype=torch.int64, device="cuda")
        x, values = torch.empty(2, 50, device="cuda"), torch.empty(9, device="cuda")
        y, dense = ops.packed_linear(x, mask, values, offsets), ops.unpack_rows(mask, values, offsets, 50)
    assert y.shape == (2, 6) and dense.shape == (6, 50) and y.device.type == dense.device.type == "cuda"
    assert accelerator.kernels.cache_info().currsize == 0


def test_every_device_has_an_implementation():
    for key in ["CUDA", "XPU", "MPS", "PrivateUse1"]:
        for name in ("packed_linear", "unpack_rows"):
            assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"optimum_neuronal::{name}", key)
        assert ops.LIBRARY.ns == "optimum_neuronal"
