"""Compile the C kernels, at installation or into the user's cache. Only the standard library: setup.py runs this too."""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


SOURCES = Path(__file__).parent
MAIN = "kernels.c"
FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")
ATTEMPTS = (("-fopenmp",), ())  # the first that succeeds: some compilers lack OpenMP


class BuildError(Exception):
    """Says why there is no compiled library and none can be compiled. The message has no full stop."""


def source_hash() -> str:
    """Return 16 hex digits that identify the source and the flags."""
    digest = hashlib.sha256(repr((FLAGS, ATTEMPTS)).encode())
    for path in sorted((*SOURCES.rglob("*.c"), *SOURCES.rglob("*.h"))):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def installed_library() -> Path:
    """Return the path where installing the package puts the compiled library of this source."""
    return SOURCES / f"kernels-{source_hash()}.so"


def find_compiler() -> list[str]:
    """Return the compiler's command: the variable CC, or the first of cc, gcc and clang."""
    if command := shlex.split(os.environ.get("CC", "")):
        if shutil.which(command[0]) is None:
            raise BuildError(f"the C compiler that CC names, {command[0]!r}, was not found")
        return command
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C compiler was found (cc, gcc or clang)")


def compile_library(target: Path) -> None:
    """Compile the source into `target`. A compilation that fails leaves no file."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        for more in ATTEMPTS:
            command = [*compiler, *FLAGS, *more, str(SOURCES / MAIN), "-o", str(built)]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", check=False
            )
            if done.returncode == 0:
                os.replace(built, target)
                return
    lines = done.stdout.splitlines() or [f"exit status {done.returncode}"]
    reason = next((line for line in lines if "error" in line), lines[0])
    raise BuildError(f"the C compiler {compiler[0]} failed: {reason}")


def cached_library() -> Path:
    """Return the compiled library in the user's cache, below XDG_CACHE_HOME or ~/.cache. Compile it if it is missing."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    machine = "-".join((sys.platform, platform.machine(), *platform.libc_ver())).replace("/", "_")
    target = base / "optimum_neuronal" / "native" / f"{source_hash()}-{machine}.so"
    try:
        if not target.exists():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # nobody else may put a library there
            compile_library(target)
    except OSError as error:
        reason = f"{error.strerror or error} (set XDG_CACHE_HOME for another)"
        raise BuildError(f"the cache directory {target.parent} cannot be used: {reason}") from error
    return target
