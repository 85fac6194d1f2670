import gc
import sys
from pathlib import Path

import pytest
import torch

from optimum_neuronal.system.peak_memory import peak_memory, reset_peak_memory


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


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the name beside the memory")
def test_a_process_may_be_called_anything():
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_bytes("prüfen".encode())
        assert peak_memory()["host"] > MB
    finally:
        name.write_bytes(before)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="its memory is told too")
def test_without_an_accelerator_there_is_the_host_alone():
    peaks = peak_memory()
    assert list(peaks) == ["host"] and isinstance(peaks["host"], int) and peaks["host"] > MB


def test_every_accelerator_in_use_is_told(monkeypatch):
    used = [0, 5 * MB]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(used))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", used.__getitem__)
    peaks = peak_memory()
    del peaks["host"]
    assert peaks == {"cuda:1": 5 * MB}
