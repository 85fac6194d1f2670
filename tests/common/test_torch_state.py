import gc
import sys
from unittest.mock import Mock

import pytest
import torch

from optimum_neuronal.common.torch_state import full_precision, multiplies_bfloat16, peak_memory, reset_peak_memory


MB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux begins anew")
def test_what_was_needed_since_the_last_reset():
    gc.collect()  # what other tests left would be freed at any moment
    reset_peak_memory()
    before = peak_memory()["host"]
    block = bytearray(256 * MB)
    block[::4096] = bytes(len(block) // 4096)  # touched, hence resident
    assert 192 * MB < peak_memory()["host"] - before < 320 * MB
    del block
    assert peak_memory()["host"] - before > 192 * MB, "a peak stays"
    reset_peak_memory()
    assert peak_memory()["host"] - before < 64 * MB


def test_accelerators_that_do_not_count(monkeypatch):
    """MPS, before torch 2.13."""
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, Mock(side_effect=RuntimeError("not a DeviceAllocator")))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    reset_peak_memory()
    assert {*peak_memory()} <= {"host"}


def test_a_cpu_with_matrix_units(monkeypatch):
    cpu = torch.device("cpu")
    faster, slower = ({"amx_bf16": True}, {"avx512_bf16": True}), ({"amx_bf16": False}, {"neon": True})
    for capabilities, expected in [*((one, True) for one in faster), *((one, False) for one in slower)]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found, raising=False)
        assert multiplies_bfloat16(cpu) is expected
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not multiplies_bfloat16(cpu), "torch 2.9 cannot tell"


BACKENDS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


@pytest.fixture
def precisions():
    """Return a function that gives the precision of products of each backend that has its own; both are set back."""
    before, of_all = [backend.fp32_precision for backend in BACKENDS], torch.get_float32_matmul_precision()
    yield lambda: tuple(backend.fp32_precision for backend in BACKENDS)
    torch.set_float32_matmul_precision(of_all)
    for backend, precision in zip(BACKENDS, before):
        backend.fp32_precision = precision


def test_the_precision_that_the_user_has_set_is_put_back(precisions):
    """For all backends or, as torch has it since 2.9, for one of them."""
    for chosen in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(chosen)
        with pytest.raises(KeyboardInterrupt), full_precision():
            assert torch.get_float32_matmul_precision() == "highest" and precisions() == ("ieee", "ieee")
            raise KeyboardInterrupt
        assert torch.get_float32_matmul_precision() == chosen
    for chosen in (("tf32", "ieee"), ("ieee", "bf16"), ("tf32", "bf16"), ("none", "none")):
        BACKENDS[0].fp32_precision, BACKENDS[1].fp32_precision = chosen
        with full_precision():
            assert precisions() == ("ieee", "ieee")
        assert precisions() == chosen
