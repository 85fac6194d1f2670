import sys

import pytest
import torch
from kernel_checks import finite

from optimum_neuronal.packed import accelerator
from optimum_neuronal.packed.packed_weight import PackedWeight
from optimum_neuronal.packed.sparse_matrix import row_blocks


@pytest.fixture(autouse=True)
def warnings(monkeypatch):
    """Return what is logged; what was found out about devices is forgotten before and after."""
    said = []
    monkeypatch.setattr(accelerator.logger, "warning", said.append)
    accelerator.find_kernels.cache_clear()
    yield said
    accelerator.find_kernels.cache_clear()


def find(device):
    return accelerator.find_kernels(torch.device(device))


def test_without_triton(monkeypatch, warnings):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "optimum_neuronal.packed.triton_kernels", raising=False)
    for _ in range(2):
        assert find("cuda:0") is None
    assert len(warnings) == 1 and "cuda:0" in warnings[0] and "pip install triton" in warnings[0]


def test_triton_that_does_not_work(monkeypatch, warnings):
    module = type(sys)("optimum_neuronal.packed.triton_kernels")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("optimum_neuronal.packed.triton_kernels", module, raising=False)

    def fail(device):
        raise RuntimeError("Failed to find C compiler")

    module.try_out = fail
    assert find("cuda:1") is None
    assert len(warnings) == 1 and "RuntimeError: Failed to find C compiler" in warnings[0]


def test_devices_without_kernels(monkeypatch, warnings):
    assert find("mps") is None and "there are no kernels for mps" in warnings.pop()
    monkeypatch.setenv("OPTIMUM_NEURONAL_KERNEL", "torch")
    assert find("cuda") is None and not warnings


def test_no_number_is_fetched_from_a_device(monkeypatch):
    """Tensors without data stand for a device's: whatever asks for a number fails."""
    monkeypatch.setattr(row_blocks, "__defaults__", (64 * 70,))
    away = PackedWeight.pack(finite((150, 70))).to(torch.device("meta"))
    assert away.multiply(torch.ones(2, 70, device="meta")).shape == (2, 150)
    assert away.to_dense().shape == (150, 70)
