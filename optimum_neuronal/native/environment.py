"""The software, hardware and kernels of this machine."""

import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from .build import BuildError
from .library import TORCH, find_kernel, find_library


def describe_environment() -> dict[str, Any]:
    """Return versions, processor, accelerators and kernels, JSON-serializable. Compile the kernels if they are missing."""
    library = find_library()
    try:
        kernel = find_kernel()
        used = (
            f"{TORCH}: packed weights save memory, but take about 30 times as long" if kernel is None else kernel.name
        )
    except ValueError as error:  # what the environment variable forces
        used = f"none: {error}"
    missing = isinstance(library, BuildError)
    return {
        "optimum_neuronal": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "accelerator": str(torch.accelerator.current_accelerator(check_available=True) or "none"),
        "kernel in use": used,
        "kernels that run here": f"none: {library}" if missing else ", ".join(library.kernels),
        "kernels compiled with threads": False if missing else library.has_threads,
    }


def processor_name() -> str:
    """Return the processor's name, or its architecture if the system has no name for it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()
