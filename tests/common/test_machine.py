import gc
import sys

import pytest
import torch
from conftest import make_model

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.common.machine import (
    full_precision,
    is_out_of_memory,
    peak_memory,
    reset_peak_memory,
    with_less_memory,
)


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match")) and not is_out_of_memory(ValueError("memory"))


def failing(largest):
    tried = []

    def work(batch_size):
        tried.append(batch_size)
        if batch_size > largest:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return batch_size

    return work, tried


def test_the_batch_is_halved_once():
    work, tried = failing(4)
    assert with_less_memory(work, 8) == 4 and tried == [8, 4]
    work, tried = failing(8)
    assert with_less_memory(work, 8) == 8 and tried == [8]
    work, tried = failing(2)
    with pytest.raises(MemoryError, match=r"batch_size=4; no weight.*max_hidden_bytes=0.*allocate 2.00 GiB"):
        with_less_memory(work, 8)
    assert tried == [8, 4]


@pytest.mark.parametrize("moment", [1, 15])
def test_a_prune_goes_on_with_half_the_batch(ids, moment, monkeypatch):
    """Whenever memory runs out, the masks are those of an undisturbed prune."""
    config = NeuronALConfig(
        0.7,
        topup="neuronal",
        num_samples=12,
        num_alignment_samples=4,
        topup_args={"block_lambdas": [0.05, 0.15], "row_lambdas": [0.1]},
        saliency="wanda",
    )
    expected = NeuronALPruner(config).prune(make_model("llama"), ids, batch_size=4).state_dict()
    from optimum_neuronal.blocks import runner as engine

    calls, original = [], engine.replay

    def replay(*args, **kwargs):
        calls.append(1)
        if len(calls) == moment:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return original(*args, **kwargs)

    monkeypatch.setattr(engine, "replay", replay)
    model = NeuronALPruner(config).prune(make_model("llama"), ids, batch_size=4)
    assert len(calls) > moment
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


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
        with full_precision(), full_precision():
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
