"""The machine: the device to compute on, the precision of its products, and memory in use or running out."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch

from .notes import get_logger


logger = get_logger(__name__)
Result = TypeVar("Result")


def default_device() -> torch.device:
    """Return the device to compute on if the user names none: the accelerator, or the CPU."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 matrix products in float32: without TensorFloat-32 or bfloat16 inside, whatever the user has set.

    The user may have set a precision for all backends (`torch.set_float32_matmul_precision`) or for one
    (`torch.backends.cuda.matmul.fp32_precision`): both are restored.
    """
    before = _precision_of_all()
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    own = [backend.fp32_precision for backend in backends]
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        for backend, precision in zip(backends, own):
            backend.fp32_precision = precision


def _precision_of_all() -> str | None:
    """Return the precision set for all backends, or None if one backend differs: torch then raises."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of an accelerator, of torch on the CPU, or of Python."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def with_less_memory(work: Callable[[int], Result], batch_size: int) -> Result:
    """Call `work(batch_size)`; if memory runs out, once more with half the batch.

    Args:
        work: a function of the sequences per forward; its result must not depend on them.
        batch_size (`int`): sequences per forward.

    Raises:
        `MemoryError`: it ran out again, or the batch is one sequence. The message quotes the allocator and says what to
            change.
    """
    try:
        return work(batch_size)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if batch_size == 1:
            raise MemoryError(_advice(batch_size, error)) from error
        logger.warning(f"Memory ran out: going on with batch_size={batch_size // 2} instead of {batch_size}. {error}")
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    try:
        return work(batch_size // 2)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(_advice(batch_size // 2, error)) from error


def _advice(batch_size: int, error: BaseException) -> str:
    smaller = f"a batch_size below {batch_size}, " if batch_size > 1 else ""
    return (
        f"Memory ran out, with batch_size={batch_size}; no weight was changed. Try {smaller}a shorter seq_length, "
        "max_hidden_bytes=0 (hidden states wait in CPU memory), or leave the weights on disk (--stream, or "
        f"device_map and offload_folder of from_pretrained). The allocator's message: {error}"
    )


def hand_back_freed() -> None:
    """Let the C library give freed memory back to the system, if it can (glibc).

    It keeps free pieces between blocks in use: a tenth of the model and more after a checkpoint was read piece by piece.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def reset_peak_memory() -> None:
    """Reset the result of [`peak_memory`], if the system can: on accelerators and on Linux."""
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_memory() -> int | None:
    """Return the bytes of this process that are in memory now; None except on Linux."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def peak_memory() -> dict[str, int]:
    """Return the largest memory so far, in bytes: of this process (`"host"`) and of every accelerator that it uses."""
    peaks = {}
    with suppress(ImportError):  # Windows
        peaks["host"] = _largest_resident_size()
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        for index in range(torch.accelerator.device_count()):
            if size := torch.accelerator.max_memory_allocated(index):
                peaks[f"{kind}:{index}"] = size
    return peaks


def _largest_resident_size() -> int:
    import resource

    with suppress(OSError):
        # The process's name stands there too, in any bytes.
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
