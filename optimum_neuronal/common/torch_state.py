"""The state in which torch computes: devices, precision, memory, evaluation mode and random numbers."""

import ctypes
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers.utils import is_torch_bf16_available_on_device

from .validation import check_count


TOKENS_PER_FORWARD = 2048  # enough to keep a processor busy, and no more memory than one of the paper's sequences


def default_device() -> torch.device:
    """Return the accelerator, or else the CPU."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def time_on(device: torch.device) -> float:
    """Return the time in seconds once a device has finished all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return True if a device multiplies bfloat16 matrices about twice as fast as float32 ones, or faster.

    False on a CPU if torch cannot tell.
    """
    if device.type == "cpu":
        found = getattr(torch.cpu, "get_capabilities", dict)()
        return bool(found.get("amx_bf16") or found.get("avx512_bf16"))
    return device.type != "mps" and is_torch_bf16_available_on_device(device)


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 matrix products without TensorFloat-32 or bfloat16; restore the user's settings afterwards."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    by_backend, of_all = [backend.fp32_precision for backend in backends], None
    with suppress(RuntimeError):  # one backend differs
        of_all = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if of_all is not None:
            torch.set_float32_matmul_precision(of_all)
        for backend, precision in zip(backends, by_backend):
            backend.fp32_precision = precision


def default_batch_size(tokens: int, most: int = TOKENS_PER_FORWARD) -> int:
    """Return the number of sequences of this many tokens in a forward pass of `most` tokens, unless the user sets it."""
    return max(1, most // max(1, tokens))


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients while the context lasts, then restore every module's own mode."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True)
class MemoryLimits:
    """How much memory a run may use. Checked when made.

    Args:
        batch_size (`int`, *optional*): sequences per forward pass. None: as many as keep a processor busy.
        max_hidden_bytes (`int`, *optional*):
            Hidden states beyond this many bytes are kept in CPU memory. None: they stay on the device.
    """

    batch_size: int | None = None
    max_hidden_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("batch_size", self.batch_size, 1), ("max_hidden_bytes", self.max_hidden_bytes, 0)):
            if value is not None:
                check_count(name, value, least)


UNLIMITED = MemoryLimits()


def trim_heap() -> None:
    """Let glibc return freed memory to the system: otherwise it keeps a tenth of a model that was read in pieces."""
    with suppress(AttributeError, TypeError):  # another C library, or Windows
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak_memory() -> None:
    """Reset the result of [`peak_memory`], on accelerators and on Linux."""
    with suppress(OSError, RuntimeError):  # no such file, or an accelerator that does not count: MPS before torch 2.13
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.reset_peak_memory_stats(index)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> dict[str, int]:
    """Return the peak memory in bytes: of this process (`"host"`, on Linux) and of the accelerators that it uses."""
    peaks = {}
    with suppress(OSError, TypeError):  # the file or the line is missing
        # The file also holds the process's name, in any bytes.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        peaks["host"] = int(re.search(r"^VmHWM:\s+(\d+)", status, re.M)[1]) * 1024
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        with suppress(RuntimeError):
            for index in range(torch.accelerator.device_count()):
                if size := torch.accelerator.max_memory_allocated(index):
                    peaks[f"{kind}:{index}"] = size
    return peaks


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch (on CPU and accelerators) when the context ends."""
    python, arrays = random.getstate(), np.random.get_state()
    kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cuda"
    try:
        with torch.random.fork_rng(device_type=kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
