import gc
import sys

import pytest

from optimum_neuronal.common.memory import peak_memory, reset_peak_memory


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
