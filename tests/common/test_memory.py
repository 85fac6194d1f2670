import gc
import sys

import pytest

from optimum_neuronal.common.torch_state import MemoryLimits, peak_memory, reset_peak_memory


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


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: expected a whole number of at least 1"),
        ({"max_hidden_bytes": -1}, "max_hidden_bytes is -1: expected a whole number of at least 0"),
    ],
)
def test_limits_are_checked_when_they_are_made(limits, message):
    with pytest.raises(ValueError, match=message):
        MemoryLimits(**limits)
