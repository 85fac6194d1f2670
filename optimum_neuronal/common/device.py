"""The device that computes, and the precision of its matrix products."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from transformers.utils import is_torch_bf16_available_on_device


TOKENS_PER_FORWARD = 2048  # enough to keep a processor busy, and no more memory than one of the paper's sequences
TRITON_DEVICES = ("cuda", "xpu")  # torch calls AMD's "cuda" too


def default_device() -> torch.device:
    """Return the accelerator, or the CPU if there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def time_on(device: torch.device) -> float:
    """Return the time in seconds once a device has finished all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def may_use_triton(device: torch.device) -> bool:
    """Return True for devices of a kind for which there are Triton kernels."""
    return device.type in TRITON_DEVICES


def triton_problem(device: torch.device, attempt: Callable[[], object]) -> str | None:
    """Return why Triton kernels don't work on a device, or None if they do. `attempt` imports and runs a small one."""
    if not may_use_triton(device):
        return f"there are no kernels for {device.type}"
    try:
        attempt()
    except ImportError as error:
        return f"they need Triton (pip install triton), which cannot be imported: {error}"
    except Exception as error:  # compilers, drivers and unknown devices raise many kinds
        return f"Triton does not work there: {type(error).__name__}: {error}"
    return None


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
