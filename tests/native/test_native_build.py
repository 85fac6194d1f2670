import importlib.util
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from full_disk import FullDisk, count_calls, files

from optimum_neuronal.native import build


COMPILER = """#!/bin/sh
echo "$@" >> {log}
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
{more}
echo compiled > "$out"
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of compiled libraries in a user's cache of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return build.cache_folder()


@pytest.fixture
def make_compiler(tmp_path, monkeypatch):
    """Makes a compiler that writes down how it was called, and CC name it."""

    def make(more: str = "") -> Path:
        path, log = tmp_path / "compiler", tmp_path / "log"
        path.write_text(COMPILER.format(log=log, more=more))
        path.chmod(0o755)
        log.touch()
        monkeypatch.setenv("CC", str(path))
        return log

    return make


def test_compiled_once_and_private(cache, make_compiler):
    log = make_compiler()
    first = build.cached_library()
    assert first.read_text() == "compiled\n" and first.parent == cache and cache.stat().st_mode & 0o777 == 0o700
    assert build.cached_library() == first and len(log.read_text().splitlines()) == 1
    assert sorted(path.name for path in cache.iterdir()) == sorted([first.name, "lock"])


def test_another_compiler_or_source_makes_another_library(cache, make_compiler, tmp_path, monkeypatch):
    make_compiler()
    first = build.cached_library()
    make_compiler("# newer")
    second = build.cached_library()
    sources = tmp_path / "sources"
    (sources / "isa").mkdir(parents=True)
    (sources / "kernels.c").write_text("int changed;")
    monkeypatch.setattr(build, "SOURCES", sources)
    third = build.cached_library()
    (sources / "isa" / "sparse_avx2.h").write_text("int changed;")
    assert len({first, second, third, build.cached_library()}) == 4


def test_a_command_with_options(cache, make_compiler, monkeypatch):
    log = make_compiler()
    monkeypatch.setenv("CC", os.environ["CC"] + " --target=this")
    build.cached_library()
    assert log.read_text().startswith("--target=this -O3")


def test_without_a_compiler_what_was_compiled_before_is_used(cache, make_compiler, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setenv("CC", "no-such-compiler -m64")
        with pytest.raises(build.BuildError, match="'no-such-compiler', was not found"):
            build.cached_library()
        patch.delenv("CC")
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(build.BuildError, match=r"^no C compiler was found \(cc, gcc or clang\)$"):
            build.cached_library()
    assert not cache.exists()
    make_compiler()
    library = build.cached_library()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert build.cached_library() == library


def test_a_failing_compiler(cache, make_compiler):
    make_compiler("echo warning: odd >&2; echo 'kernels.c:1: error: no such header' >&2; exit 1")
    with pytest.raises(build.BuildError, match="failed: kernels.c:1: error: no such header$"):
        build.cached_library()
    assert [path.name for path in cache.iterdir()] == ["lock"], "nothing half written is left"


def test_a_compiler_without_openmp(cache, make_compiler):
    log = make_compiler("grep -q fopenmp {0} && [ $(wc -l < {0}) = 1 ] && exit 1".format("$(dirname $0)/log"))
    build.cached_library()
    assert ["-fopenmp" in line for line in log.read_text().splitlines()] == [True, False]


def test_an_assembler_that_is_older_than_the_compiler(cache, make_compiler):
    log = make_compiler("tail -1 {} | grep -q NEURONAL_NO_DOT || exit 1".format("$(dirname $0)/log"))
    build.cached_library()
    flags = [("-fopenmp" in line, "-DNEURONAL_NO_DOT" in line) for line in log.read_text().splitlines()]
    assert flags == [(True, False), (False, False), (True, True)]


def test_a_cache_that_cannot_be_written(make_compiler, tmp_path, monkeypatch):
    make_compiler()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    message = r"the cache directory .* cannot be used: Not a directory \(set XDG_CACHE_HOME for another\)"
    with pytest.raises(build.BuildError, match=message):
        build.cached_library()


def test_a_disk_that_is_full_at_any_call(cache, make_compiler):
    """An error in words, and no library or half of one; with room again it is compiled."""
    make_compiler()
    calls = count_calls(build.cached_library)
    for number in range(1, calls + 1):
        shutil.rmtree(cache.parents[1])
        with pytest.raises(build.BuildError, match="the cache directory .* cannot be used: No space left on device"):
            FullDisk(number).run(build.cached_library)
        assert {Path(name).name for name in files(cache.parents[1])} <= {"lock"}
        assert build.cached_library().read_text() == "compiled\n"
    assert calls > 3


@pytest.mark.parametrize("variables", [{"XDG_CACHE_HOME": "cache"}, {"HOME": "home"}, {}])
def test_no_cache_in_the_working_directory(tmp_path, monkeypatch, variables):
    """Where there is no home directory, as for a user without an entry, "~" stays what it is."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if not variables:
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(build.BuildError, match="^the cache directory .* is not absolute: set HOME or XDG_CACHE_HOME$"):
        build.cached_library()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser may write everywhere")
def test_a_cache_that_may_only_be_read(cache, make_compiler):
    make_compiler()
    cache.mkdir(parents=True)
    cache.chmod(0o500)
    with pytest.raises(build.BuildError, match="cannot be used: Permission denied"):
        build.cached_library()


@pytest.mark.parametrize(
    ("place", "mode"), [("library", 0o666), ("folder", 0o777), ("folder", 0o770), ("above", 0o777)]
)
def test_where_others_may_write_nothing_is_loaded_or_compiled(cache, make_compiler, place, mode):
    log = make_compiler()
    library = build.cached_library()
    path = {"library": library, "folder": cache, "above": cache.parent}[place]
    path.chmod(mode)
    refused = partial(pytest.raises, build.BuildError, match=f"^{path} may be written by others")
    with refused():
        build.cached_library()
    if place != "library":
        library.unlink()
        with refused():
            build.cached_library()
    assert len(log.read_text().splitlines()) == 1


def test_nothing_of_another_user_is_loaded(cache, make_compiler, monkeypatch):
    make_compiler()
    build.cached_library()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    os.chown(cache, 4321, -1) if os.geteuid() == 0 else None
    with pytest.raises(build.BuildError, match="belongs to another user"):
        build.cached_library()


def test_several_processes_compile_once(cache, make_compiler):
    log = make_compiler("sleep 1")
    program = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('build', sys.argv[1]);"
        "build = importlib.util.module_from_spec(spec); spec.loader.exec_module(build); print(build.cached_library())"
    )
    command = [sys.executable, "-c", program, build.__file__]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    libraries = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert len(libraries) == 1 and Path(libraries.pop()).exists()
    assert len(log.read_text().splitlines()) == 1


def test_the_installation_needs_only_the_standard_library():
    """setup.py runs this module before anything that the package needs is there."""
    program = "import importlib.util, sys; spec = importlib.util.spec_from_file_location('b', sys.argv[1]); spec.loader.exec_module(importlib.util.module_from_spec(spec))"
    subprocess.run([sys.executable, "-S", "-c", program, build.__file__], check=True)
    assert importlib.util.find_spec("optimum_neuronal.native.build").origin == build.__file__
