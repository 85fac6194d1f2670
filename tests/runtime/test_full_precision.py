import pytest
import torch

from optimum_neuronal.runtime.full_precision import full_precision


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
