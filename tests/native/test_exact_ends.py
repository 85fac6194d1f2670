"""The C source in a program of its own, whose buffers end exactly where they must."""

import subprocess
from pathlib import Path

import pytest
from profiles import NIGHT

from optimum_neuronal.native.build import SOURCES, BuildError, find_compiler
from optimum_neuronal.native.library import KERNELS


PROGRAM = Path(__file__).parent / "exact_ends.c"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
if not NIGHT:  # checks of every pointer, which double the time to compile; a null pointer ends the program anyway
    SANITIZE.append("-fno-sanitize=alignment,null")
TRIALS = "40" if NIGHT else "12"


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_under_sanitizers(tmp_path):
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    empty = [*compiler, *SANITIZE, "-x", "c", "/dev/null", "-shared", "-o", str(tmp_path / "empty")]
    if subprocess.run(empty, capture_output=True).returncode:
        pytest.skip(f"{compiler[0]} has no address sanitizer")
    program, options = str(tmp_path / "program"), ["-std=c11", "-ffp-contract=off", "-O0", f"-I{SOURCES}", *SANITIZE]
    run([*compiler, *options, str(PROGRAM), "-o", program, "-lm"])
    assert f"kernel {KERNELS['portable']}\n" in run([program, TRIALS])
