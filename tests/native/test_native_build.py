import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from optimum_neuronal.native import build


ROOT = Path(build.__file__).parents[2]
COMPILER = """#!/bin/sh
echo "$@" >> {log}
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
{more}
echo compiled > "$out"
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Return the folder of compiled libraries in a cache of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "optimum_neuronal" / "native"


@pytest.fixture
def make_compiler(tmp_path, monkeypatch):
    """Return a function that makes a compiler, which logs its arguments, and names it in CC."""

    def make(more: str = "") -> Path:
        path, log = tmp_path / "compiler", tmp_path / "log"
        path.write_text(COMPILER.format(log=log, more=more))
        path.chmod(0o755)
        log.touch()
        monkeypatch.setenv("CC", str(path))
        return log

    return make


def test_compiled_once_and_private(cache, make_compiler, monkeypatch, tmp_path):
    log = make_compiler()
    first = build.cached_library()
    assert first.read_text() == "compiled\n" and first.parent == cache and cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.cached_library() == first and len(log.read_text().splitlines()) == 1
    assert list(cache.iterdir()) == [first]
    make_compiler()
    (tmp_path / "kernels.c").write_text("int changed;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.cached_library() != first, "of other sources"


def test_without_a_compiler(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(build.BuildError, match="'no-such-compiler', was not found"):
        build.cached_library()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"^no C compiler was found \(cc, gcc or clang\)$"):
        build.cached_library()


def test_a_failing_compiler_leaves_nothing(cache, make_compiler):
    make_compiler("echo warning: odd >&2; echo 'kernels.c:1: error: no such header' >&2; exit 1")
    with pytest.raises(build.BuildError, match="failed: kernels.c:1: error: no such header$"):
        build.cached_library()
    assert not list(cache.iterdir())


def test_without_openmp(cache, make_compiler):
    log = make_compiler('tail -1 "$(dirname $0)/log" | grep -q -- -fopenmp && exit 1')
    build.cached_library()
    assert ["-fopenmp" in line for line in log.read_text().splitlines()] == [True, False]


def test_a_cache_that_cannot_be_written(make_compiler, tmp_path, monkeypatch):
    make_compiler()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    message = r"the cache directory .* cannot be used: Not a directory \(set XDG_CACHE_HOME for another\)"
    with pytest.raises(build.BuildError, match=message):
        build.cached_library()


def test_the_installation_needs_only_the_standard_library():
    """setup.py runs this module before the requirements of the package are installed."""
    program = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('b', sys.argv[1]);"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))"
    )
    subprocess.run([sys.executable, "-S", "-c", program, build.__file__], check=True)


@pytest.fixture
def sources(tmp_path) -> Path:
    """What an installation needs of the repository."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("the package is installed without its setup.py")
    target = tmp_path / "sources"
    shutil.copytree(build.SOURCES, target / "optimum_neuronal" / "native", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "setup.py", target)
    return target


def install(sources, *options) -> tuple[subprocess.CompletedProcess, list[Path]]:
    """Let setup.py build the extension. Return which libraries there are then."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", "out", *options]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=120)
    return done, sorted(path.relative_to(sources) for path in sources.rglob("kernels-*.so"))


@pytest.mark.parametrize("editable", [False, True])
def test_the_library_lies_where_it_is_looked_for(sources, make_compiler, editable):
    make_compiler()
    done, libraries = install(sources, *(["--inplace"] if editable else []))
    assert done.returncode == 0, done.stderr[-2000:]
    name = Path("optimum_neuronal", "native", build.installed_library().name)
    assert libraries == ([name, "out" / name] if editable else ["out" / name])
    assert (sources / libraries[0]).read_text() == "compiled\n"


@pytest.mark.parametrize("compiler, why", [("no-such-compiler", "was not found"), ("false", "failed: exit status 1")])
def test_without_a_compiler_that_works_it_succeeds_and_says_so(sources, compiler, why, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    for options in ([], ["--inplace"]):
        done, libraries = install(sources, *options)
        assert done.returncode == 0 and not libraries, done.stderr[-2000:]
        assert "the kernels for packed weights are not compiled" in done.stderr + done.stdout
        assert why in done.stderr + done.stdout
