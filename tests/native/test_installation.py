"""What setup.py does about the kernels: compiles them if it can, and never fails for want of a compiler."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from optimum_neuronal.native import build


ROOT = Path(build.__file__).parents[2]
NAMES = "kernels-*.so"
COMPILER = '#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done\necho compiled > "$out"\n'

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="the package is installed without its setup.py"
)


@pytest.fixture
def sources(tmp_path) -> Path:
    """What an installation needs of the repository."""
    target = tmp_path / "sources"
    shutil.copytree(build.SOURCES, target / "optimum_neuronal" / "native", ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "setup.py", target)
    return target


def install(sources, monkeypatch, compiler: str, *options) -> tuple[subprocess.CompletedProcess, list[Path]]:
    """Builds the extension, and tells which libraries there are then."""
    monkeypatch.setenv("CC", compiler)
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", "out", *options]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=120)
    return done, sorted(path.relative_to(sources) for path in sources.rglob(NAMES))


@pytest.mark.parametrize("editable", [False, True])
def test_the_library_lies_where_it_is_looked_for(sources, editable, monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    done, libraries = install(sources, monkeypatch, str(compiler), *(["--inplace"] if editable else []))
    assert done.returncode == 0, done.stderr[-2000:]
    name = Path("optimum_neuronal", "native", build.installed_library().name)
    assert libraries == ([name, "out" / name] if editable else ["out" / name])
    assert (sources / libraries[0]).read_text() == "compiled\n"


@pytest.mark.parametrize("compiler, why", [("no-such-compiler", "was not found"), ("false", "failed: exit status 1")])
def test_without_a_compiler_that_works_it_succeeds_and_says_so(sources, compiler, why, monkeypatch):
    for options in ([], ["--inplace"]):
        done, libraries = install(sources, monkeypatch, compiler, *options)
        assert done.returncode == 0 and not libraries, done.stderr[-2000:]
        assert "the kernels for packed weights are not compiled" in done.stderr + done.stdout
        assert why in done.stderr + done.stdout
