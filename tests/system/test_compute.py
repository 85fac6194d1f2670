import pytest
import torch

from optimum_neuronal.system.compute import default_device, full_precision


@pytest.fixture(params=["highest", "high", "medium"])
def users_choice(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def test_what_the_user_has_set_is_put_back(users_choice):
    with full_precision():
        assert torch.get_float32_matmul_precision() == "highest"
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == users_choice


def test_after_an_error_too(users_choice):
    with pytest.raises(KeyboardInterrupt), full_precision():
        raise KeyboardInterrupt
    assert torch.get_float32_matmul_precision() == users_choice


def precisions():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture
def backends():
    """Those whose products have a precision of their own; they are set back."""
    found = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = precisions()
    yield found
    torch.set_float32_matmul_precision("highest")
    for backend, precision in zip(found, before):
        backend.fp32_precision = precision


def test_what_was_set_for_a_backend_alone(backends):
    """As torch has it since 2.9; it then refuses to tell what holds for all."""
    for chosen in (("tf32", "ieee"), ("ieee", "bf16"), ("tf32", "bf16"), ("none", "none")):
        for backend, precision in zip(backends, chosen):
            backend.fp32_precision = precision
        with full_precision():
            assert precisions() == ("ieee", "ieee")
        assert precisions() == chosen


def test_what_was_set_for_all_and_then_for_one(backends):
    torch.set_float32_matmul_precision("high")
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    with full_precision():
        assert precisions() == ("ieee", "ieee")
    assert precisions() == ("tf32", "ieee")


def test_the_default_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert default_device() == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert default_device() == torch.device("meta")
