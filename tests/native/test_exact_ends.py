"""The C source in a program of its own, whose buffers end exactly where they must."""

import platform
import shutil
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
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def kernels_of(output: str) -> set[str]:
    names = {code: name for name, code in KERNELS.items()}
    return {names[int(line.split()[1])] for line in output.splitlines()}


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def compile_program(compiler: list[str], target: Path, *flags: str) -> None:
    options = ["-std=c11", "-ffp-contract=off", "-O0", f"-I{SOURCES}", *flags]
    run([*compiler, *options, str(PROGRAM), "-o", str(target), "-lm"])


def test_under_sanitizers(tmp_path):
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    empty = [*compiler, *SANITIZE, "-x", "c", "/dev/null", "-shared", "-o", str(tmp_path / "empty")]
    if subprocess.run(empty, capture_output=True).returncode:
        pytest.skip(f"{compiler[0]} has no address sanitizer")
    compile_program(compiler, tmp_path / "program", *SANITIZE)
    assert "portable" in kernels_of(run([str(tmp_path / "program"), TRIALS]))


@pytest.mark.skipif(
    platform.machine() == "aarch64" or not shutil.which(CROSS) or not shutil.which(EMULATOR),
    reason=f"needs {CROSS} and {EMULATOR} (on Debian: gcc-aarch64-linux-gnu, qemu-user)",
)
def test_neon_in_an_emulator(tmp_path):
    compile_program([CROSS], tmp_path / "program", "-static")
    assert kernels_of(run([EMULATOR, str(tmp_path / "program"), TRIALS])) == {"portable", "neon"}
