"""Triton's kernels without a GPU: in Triton's interpreter, which is chosen before triton is imported, and
through its compilers. Hence both run in processes of their own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_kernels


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
HERE = Path(__file__).parent


def run(arguments, tmp_path, **environment):
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **environment,
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parent.parent)


@needs_triton
def test_in_the_interpreter(tmp_path):
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_triton.py")]
    result = run(tests, tmp_path, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


@needs_triton
def test_for_gpus_that_are_not_there(tmp_path):
    result = run([str(HERE / "compiled_triton.py")], tmp_path, TRITON_INTERPRET="0")
    assert result.returncode == 0, result.stdout + result.stderr


def test_without_a_gpu_nothing_can_be_timed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_kernels"])
    monkeypatch.setattr(gpu_kernels, "default_device", lambda: torch.device("cpu"))
    with pytest.raises(SystemExit):
        gpu_kernels.main()
    assert "the device is cpu: expected a GPU with Triton, or --count" in capsys.readouterr().err
