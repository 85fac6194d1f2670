"""Triton's kernels without a GPU: in Triton's interpreter, which is chosen before triton is imported, and
through its compilers. Hence both run in processes of their own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
HERE = Path(__file__).parent


def run(arguments, tmp_path, **environment):
    more = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **more}, cwd=HERE.parent.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_in_the_interpreter(tmp_path):
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_triton.py")]
    assert " passed" in run(tests, tmp_path, TRITON_INTERPRET="1")


def test_for_gpus_that_are_not_there(tmp_path):
    run([str(HERE / "compiled_triton.py")], tmp_path, TRITON_INTERPRET="0")
