"""What several benchmarks use: random models, resident memory, and the arithmetic of a device."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_neuronal.common.torch_state import full_precision, time_on


MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc returns freed memory at once


def random_llama(hidden_size: int, blocks: int, tokens: int, **more) -> LlamaForCausalLM:
    """Return a random Llama with the proportions of Llama-2-7B; `more` are further fields of its config."""
    fields = {
        "hidden_size": hidden_size,
        "intermediate_size": int(hidden_size * 2.6875),
        "num_hidden_layers": blocks,
        "num_attention_heads": max(1, hidden_size // 64),
        "max_position_embeddings": tokens,
        "vocab_size": 1000,
    }
    return LlamaForCausalLM(LlamaConfig(**{**fields, **more})).eval()


def resident(key: str, process: int | str = "self") -> int:
    """Return `VmRSS` (now), `VmHWM` (peak since the last reset) or `VmData` of a process in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def zero_randomly(model: torch.nn.Module, share: float) -> None:
    """Set a share of the elements of all projections to zero, in place."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            for rows in weight.data.split(256):
                rows.masked_fill_(torch.rand(rows.shape, generator=generator, device=generator.device) < share, 0)


def milliseconds(device: torch.device, work: Callable, repeats: int) -> float:
    """Return the mean time of repeated work, after as much to warm up."""
    for _ in range(2):
        start = time_on(device)
        for _ in range(repeats):
            work()
        seconds = time_on(device) - start
    return 1e3 * seconds / repeats


def peak_teraflops(rows: int, device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """Return the operations per second of large square products, in 10^12."""
    factor = torch.randn(rows, rows).to(device, dtype)
    with full_precision():
        return 2e-9 * rows**3 / milliseconds(device, partial(torch.mm, factor, factor), repeats)


def share_of_peak(forwards: int, tokens: int, block: torch.nn.Module, seconds: float, teraflops: float) -> float:
    """Return the share of the peak that runs of a block on sequences reach, without attention's products."""
    return 2e-12 * forwards * tokens * sum(weight.numel() for weight in block.parameters()) / seconds / teraflops
