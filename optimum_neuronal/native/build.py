"""Compiles the C source, at installation or into the user's cache. Only the standard library: setup.py runs it too.

A library is code that a process runs, so one is loaded only from where nobody else can have put it: see `check_private`.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SOURCES = Path(__file__).parent
MAIN = "kernels.c"
FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off")
THREADS = "-fopenmp"  # left out where the compiler does not know it
NO_DOT = "-DNEURONAL_NO_DOT"  # where a compiler's assembler is older than it, and does not know AVX-VNNI
ATTEMPTS = ((THREADS,), (), (THREADS, NO_DOT), (NO_DOT,))  # the first that succeeds
SECONDS = 300  # that a compiler may take


class BuildError(Exception):
    """There is no compiled library, and none can be made. The message says why, without a full stop."""


def digest() -> str:
    """16 hex digits of everything that the compiled library depends on, but the compiler and the machine."""
    found = hashlib.sha256(repr((FLAGS, ATTEMPTS)).encode())
    for path in sorted((*SOURCES.rglob("*.c"), *SOURCES.rglob("*.h"))):
        found.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def installed_library() -> Path:
    """Return the path at which the installation puts the compiled library; another source's library has another name."""
    return SOURCES / f"kernels-{digest()}.so"


def find_compiler() -> list[str]:
    """The compiler's command: what the variable CC says, else the first of cc, gcc and clang.

    Raises:
        [`BuildError`]: there is none.
    """
    if os.environ.get("CC"):
        command = shlex.split(os.environ["CC"])
        path = shutil.which(command[0])
        if path is None:
            raise BuildError(f"the C compiler that CC names, {command[0]!r}, was not found")
        return [path, *command[1:]]
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return [path]
    raise BuildError("no C compiler was found (cc, gcc or clang)")


def compile_library(target: Path, compiler: list[str] | None = None) -> None:
    """Compiles the source; the file appears under its name as a whole, or not at all.

    Args:
        target (`Path`): the library; its folder exists.
        compiler (`list[str]`, *optional*): its command; else what [`find_compiler`] finds.

    Raises:
        [`BuildError`]: there is no compiler, or it fails. `OSError`: the folder may not be written.
    """
    compiler = compiler or find_compiler()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=".tmp")
    os.close(handle)
    try:
        errors = []
        for more in ATTEMPTS:
            errors.append(_run([*compiler, *FLAGS, *more, str(SOURCES / MAIN), "-o", name]))
            if errors[-1] is None:
                break
        else:
            raise BuildError(f"the C compiler {compiler[0]} failed: {errors[0]}")
        os.chmod(name, 0o755)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> str | None:
    """Runs a compiler; returns None if it succeeded, else the first line that tells of an error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()]
    return (telling or lines or [f"exit status {done.returncode}"])[0]


def cached_library() -> Path:
    """The compiled library in the user's cache, compiled now if it is not there yet.

    Several processes may ask at once: one compiles, the others wait.

    Raises:
        [`BuildError`]: there is no compiler, it fails, or the cache may not be written or not be trusted.
    """
    folder = cache_folder()
    try:
        compiler, missing = find_compiler(), None
    except BuildError as error:
        compiler, missing = None, error
    found = next(_candidates(folder, compiler), None)
    if found is not None:
        check_private(found)
        return found
    if missing is not None:
        raise missing
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)
        target = folder / _name(compiler)
        with _locked(folder):
            if not target.exists():
                compile_library(target, compiler)
    except OSError as error:
        reason = f"{error.strerror or error} (set XDG_CACHE_HOME for another)"
        raise BuildError(f"the cache directory {folder} cannot be used: {reason}") from error
    return target


def cache_folder() -> Path:
    """The folder of compiled libraries in the user's cache: below XDG_CACHE_HOME, else ~/.cache.

    Raises:
        [`BuildError`]: there is no home directory, or these are relative, so that each working directory had its own cache.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):
        raise BuildError(f"the cache directory {base} is not absolute: set HOME or XDG_CACHE_HOME")
    return Path(os.path.realpath(base)) / "optimum_neuronal" / "native"


def _machine() -> str:
    """Return what a library has to fit: system, processor family and C library."""
    return "-".join((sys.platform, platform.machine(), *platform.libc_ver())).replace("/", "_")


def _name(compiler: list[str]) -> str:
    about = os.stat(compiler[0])
    identity = f"{' '.join(compiler)} {os.path.realpath(compiler[0])} {about.st_size} {about.st_mtime_ns}"
    return f"{digest()}-{_machine()}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}.so"


def _candidates(folder: Path, compiler: list[str] | None) -> Iterator[Path]:
    """Libraries of this source and machine that this compiler has made; without a compiler, that any has made."""
    names = [_name(compiler)] if compiler else sorted(p.name for p in folder.glob(f"{digest()}-{_machine()}-*.so"))
    return (folder / name for name in names if (folder / name).exists())


def check_private(path: Path) -> None:
    """Makes sure that nobody but the user and the superuser can have put a file where it is, or can exchange it.

    Raises:
        [`BuildError`]: it, its folder or one above it belongs to somebody else or may be written by everybody (a
            folder with the sticky bit, such as /tmp, apart); or it or its folder may be written by a group.
    """
    if not hasattr(os, "getuid"):
        return
    path = Path(os.path.realpath(path))
    near = {path, path.parent} if path.is_file() else {path}
    for place in (path, *path.parents):
        about = os.stat(place)
        if about.st_uid not in (0, os.getuid()):
            raise BuildError(f"{place} belongs to another user, so that no library is loaded from there")
        sticky = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX and place not in near
        unsafe = stat.S_IWOTH | (stat.S_IWGRP if place in near else 0)
        if about.st_mode & unsafe and not sticky:
            raise BuildError(f"{place} may be written by others, so that no library is loaded from there")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits until no other process compiles into a folder. The system frees the lock of a process that dies."""
    with open(folder / "lock", "w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_cut_off(path: Path) -> bool:
    """Return True for an ELF file that ends before its last table: to load it would end the process by a signal."""
    with path.open("rb") as file:
        header = file.read(64)
    if not header.startswith(b"\x7fELF"):
        return False
    if len(header) < 64:
        return True
    start, entry, entries = struct.unpack_from("<40xQ10xHH", header)
    return path.stat().st_size < start + entry * entries
