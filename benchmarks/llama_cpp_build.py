"""Builds llama.cpp's programs from the sdist of llama-cpp-python, which the package index has."""

import subprocess
import sys
import tarfile
from pathlib import Path


VERSION = "0.3.36"  # of llama-cpp-python
TARGETS = ("llama-bench", "llama-batched-bench", "llama-quantize")
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    f"-DLLAMA_BUILD_COMMIT=llama-cpp-python-{VERSION}",
)
# GCC 12 drops the stores to the tile configuration, and the AMX kernels crash: it does not see that the load reads them.
LOAD = "    _tile_loadconfig(&tc);"
BARRIER = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n'


def build(folder: Path, jobs: int) -> Path:
    """Builds llama.cpp in a folder, which takes ten minutes or more, and returns the folder of its programs.

    A build that was stopped goes on.

    Raises:
        `subprocess.CalledProcessError`: pip, cmake or the compiler failed; what they said is on the terminal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    if not source.exists():
        _download(folder)
    amx = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    text = amx.read_text(encoding="utf-8")
    if LOAD in text and BARRIER not in text:
        amx.write_text(text.replace(LOAD, BARRIER + LOAD), encoding="utf-8")
    target = source / "build"
    subprocess.run(["cmake", "-S", source, "-B", target, *FLAGS], check=True)
    subprocess.run(["cmake", "--build", target, "-j", str(jobs), "--target", *TARGETS], check=True)
    return target / "bin"


def _download(folder: Path) -> None:
    """Unpacks the sdist into a folder."""
    name = "llama-cpp-python"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name, "--dest", folder]
    subprocess.run([*pip, f"{name}=={VERSION}"], check=True)
    with tarfile.open(folder / f"llama_cpp_python-{VERSION}.tar.gz") as sdist:
        sdist.extractall(folder, filter="data")
