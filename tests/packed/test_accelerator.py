import sys

import pytest
import torch
from weights import all_matrices

from optimum_neuronal.packed import accelerator
from optimum_neuronal.packed.formats import packed_matrix


@pytest.fixture(autouse=True)
def warnings(monkeypatch):
    """Return what is logged; what was found out about devices is forgotten before and after."""
    said = []
    monkeypatch.setattr(accelerator.logger, "warning", said.append)
    accelerator._has_triton.cache_clear()
    yield said
    accelerator._has_triton.cache_clear()


def find(device):
    return accelerator.find_kernels("sparse", torch.device(device))


def test_without_triton(monkeypatch, warnings):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "optimum_neuronal.packed.triton_sparse", raising=False)
    for _ in range(2):
        assert find("cuda:0") is None
    assert len(warnings) == 1 and "cuda:0" in warnings[0] and "pip install triton" in warnings[0]


def test_triton_that_does_not_work(monkeypatch, warnings):
    module = type(sys)("optimum_neuronal.packed.triton_sparse")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("optimum_neuronal.packed.triton_sparse", module, raising=False)

    def fail(*_, **__):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch, "zeros", fail)
    assert find("cuda:1") is None
    assert len(warnings) == 1 and "RuntimeError: Failed to find C compiler" in warnings[0]


def test_devices_that_triton_does_not_know(warnings):
    assert find("mps") is None
    assert "there are none for mps" in warnings[0]


def test_torch_can_be_forced(monkeypatch, warnings):
    monkeypatch.setenv("OPTIMUM_NEURONAL_KERNEL", "torch")
    assert find("cuda") is None and not warnings


def test_the_way_of_devices_is_bit_equal():
    """Tensors of a device that has no kernels: each part is unpacked by what is there."""
    for matrix in all_matrices(19, 77, torch.bfloat16):
        assert torch.equal(accelerator.unpack(matrix), matrix.unpack())
        x = torch.randn(3, 77).bfloat16()
        assert torch.equal(accelerator.linear(matrix, x, None), matrix.linear(x))


def test_no_number_is_fetched_from_a_device(monkeypatch):
    """Tensors without data stand for a device's: whatever asks for a number fails."""
    monkeypatch.setattr(packed_matrix.row_blocks, "__defaults__", (64 * 70,))
    for matrix in all_matrices(150, 70):
        away = matrix.to(torch.device("meta"))
        assert away.linear(torch.ones(2, 70, device="meta")).shape == (2, 150)
        assert away.unpack().shape == (150, 70)
