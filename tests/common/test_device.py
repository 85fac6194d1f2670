import pytest
import torch

from optimum_neuronal.common.device import full_precision, multiplies_bfloat16


def test_a_cpu_with_matrix_units(monkeypatch):
    cpu = torch.device("cpu")
    faster, slower = ({"amx_bf16": True}, {"avx512_bf16": True}), ({"amx_bf16": False}, {"neon": True})
    for capabilities, expected in [*((one, True) for one in faster), *((one, False) for one in slower)]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found, raising=False)
        assert multiplies_bfloat16(cpu) is expected
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not multiplies_bfloat16(cpu), "torch 2.9 cannot tell"


@pytest.fixture
def precisions():
    """The precision of products of each backend that has its own; both are set back."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before, for_all = [backend.fp32_precision for backend in backends], torch.get_float32_matmul_precision()
    yield lambda: tuple(backend.fp32_precision for backend in backends)
    torch.set_float32_matmul_precision(for_all)
    for backend, precision in zip(backends, before):
        backend.fp32_precision = precision


def test_the_precision_that_the_user_has_set_is_put_back(precisions):
    for chosen in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(chosen)
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        with pytest.raises(KeyboardInterrupt), full_precision():
            raise KeyboardInterrupt
        assert torch.get_float32_matmul_precision() == chosen


def test_a_precision_that_was_set_for_one_backend_is_put_back(precisions):
    """As torch has it since 2.9; it then raises an error for what holds for all."""
    cuda, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    for chosen in (("tf32", "ieee"), ("ieee", "bf16"), ("tf32", "bf16"), ("none", "none")):
        cuda.fp32_precision, mkldnn.fp32_precision = chosen
        with full_precision():
            assert precisions() == ("ieee", "ieee")
        assert precisions() == chosen
    torch.set_float32_matmul_precision("high")
    mkldnn.fp32_precision = "ieee"
    with full_precision():
        assert precisions() == ("ieee", "ieee")
    assert precisions() == ("tf32", "ieee")
