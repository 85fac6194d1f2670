"""Asks llama.cpp's `llama-quantize` which type it would give each tensor of a GGUF file."""

import re
import subprocess
from pathlib import Path

from optimum_neuronal.evaluation.llama_cpp import find_program


PLANNED = re.compile(r"\] (\S+)\s+- \[.*\((\S+)\)\s*$", re.MULTILINE)  # name and type of a tensor


def planned_types(programs: Path, file: Path, kind: str) -> dict[str, str]:
    """The type (`"q4_K"`) by name, of every tensor that would be quantised.

    Args:
        programs: folder of llama.cpp's programs.
        file: a GGUF file in bfloat16.
        kind: as llama-quantize takes it: `"Q2_K"`.

    Raises:
        `ValueError`: it would quantise nothing. The message has the end of what it printed.
    """
    command = [find_program("llama-quantize", programs), "--dry-run", file, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    plan = dict(PLANNED.findall(done.stdout + done.stderr))
    if done.returncode or not plan:
        said = (done.stdout + done.stderr)[-300:]
        raise ValueError(f"llama-quantize ended with status {done.returncode} and no plan for {kind}: {said}")
    return plan
