"""Compiles Triton's kernels for GPUs that need not be there, as they would be at a call; run by test_triton_kernels.py."""

from itertools import product

import torch
from profiles import by_day

from benchmarks.gpu_kernels import PLAIN, compiled, count, instructions


# Vectors -> instructions for each element that is kept: at 50% a dense product has time for 34.
LIMITS = {1: 14, 8: 30}

for architecture, (vectors, limit) in product((80, 89, 90), LIMITS.items()):
    counted = instructions(compiled(vectors, architecture))
    assert 0 < counted <= limit, (architecture, vectors, counted)

assert all("H100" in table for table in list(count())[1:])

for dtype, vectors in by_day(
    product((torch.float16, torch.float32), (0, 1, 4, 8)), (torch.float16, 8), (torch.float32, 0), (torch.float32, 4)
):
    compiled(vectors, 90, dtype)
for vectors in by_day((0, 1, 4, 8), 8):
    compiled(vectors, "gfx942")
compiled(1, 90, fixed={})  # with a bias, and experts that are chosen
for vectors in by_day((0, 1, 8), 1):
    compiled(vectors, 90, fixed={**PLAIN, "count": 1, "rows": 1, "columns": 1, "experts": 1})
