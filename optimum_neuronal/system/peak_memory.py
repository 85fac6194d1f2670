"""The memory that this process and its accelerators use, and the most that they have used."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch


def reset_peak_memory() -> None:
    """Begins anew with what [`peak_memory`] tells, where the system allows it: on accelerators and on Linux."""
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_memory() -> int | None:
    """Bytes of this process in memory at the moment; None where the system does not tell (Linux does)."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def peak_memory() -> dict[str, int]:
    """Largest memory so far, in bytes: of this process (`"host"`) and of every accelerator that it uses."""
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
        # The process's name stands there too, in whatever bytes it was given.
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
