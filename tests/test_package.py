"""How the package is laid out, and what the sdist and the wheel contain."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import optimum_neuronal
from optimum_neuronal import NeuronALConfig, NeuronALPruner


ROOT = Path(__file__).parents[1]
VERSION = optimum_neuronal.__version__
NOTICE = "optimum_neuronal/demo/tiny_model/NOTICE"

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="it is installed without it")


def test_the_layout():
    package = ROOT / "optimum_neuronal"
    files = list(package.rglob("*.py"))
    top = {path.relative_to(package).parts[0] for path in files} - {"__init__.py"}
    assert len(top) <= 24, sorted(top)
    named = [path for path in files if path.name not in ("__init__.py", "base.py")]
    counts = Counter(path.name for path in named)
    assert not [name for name, count in counts.items() if count > 1]
    for path in files:
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)}
        assert not used & {"print", "torch.cuda"}, path


WAYS = {
    "magnitude": NeuronALConfig(0.5, "magnitude", topup="uniform", num_samples=12),
    "wanda": NeuronALConfig(0.5, "wanda", topup_args={"steps": "both"}, num_samples=12, num_alignment_samples=4),
    "default": NeuronALConfig(0.6, num_samples=12, num_alignment_samples=4),
    "paper": NeuronALConfig.preset("paper", sparsity=0.5, num_samples=12, num_alignment_samples=4),
    "best": NeuronALConfig.preset("best", sparsity=0.5, num_samples=16),
}


@pytest.mark.parametrize(
    "way, most_files", [("magnitude", 22), ("wanda", 26), ("default", 24), ("paper", 27), ("best", 26)]
)
def test_pruning_can_be_read_in_few_files(way, most_files, llama, ids):
    """Each file more that every pruning run enters is one more that its reader has to open, each call one more to follow."""
    pruner, package, entered, calls, deepest = NeuronALPruner(WAYS[way]), str(ROOT / "optimum_neuronal"), {}, [], 0

    def note(frame, event, _argument):
        nonlocal deepest
        code = frame.f_code
        if code.co_filename.startswith(package) and not code.co_name.startswith("<"):  # no comprehension, no lambda
            if event == "call":
                entered.setdefault(code.co_filename, code.co_name)
                calls.append(code)
                deepest = max(deepest, len(calls))
            elif event == "return":
                calls.pop()

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        pruner.prune(llama, ids.repeat(2, 1)[: WAYS[way].num_samples])
    finally:
        sys.setprofile(before)
    assert most_files - 2 <= len(entered) <= most_files, sorted(entered)
    assert deepest <= 17


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> tuple[set[str], set[str], str]:
    """The files of the sdist, those of the wheel less its metadata, and the metadata."""
    folder = tmp_path_factory.mktemp("packages")
    command = ["setup.py", "-q", "egg_info", "--egg-base", folder, "build_py", "--build-lib", folder / "wheel"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    info = folder / "optimum_neuronal.egg-info"
    in_wheel = {str(path.relative_to(folder / "wheel")) for path in (folder / "wheel").rglob("*") if path.is_file()}
    return set((info / "SOURCES.txt").read_text().split("\n")), in_wheel, (info / "PKG-INFO").read_text("utf-8")


def test_the_sdist_holds_what_its_tests_and_commands_need(packages):
    in_sdist, *_ = packages
    needed = ["constraints.txt", "constraints-lowest.txt", "Makefile", "mkdocs.yml", ".ci/run", "setup.py", NOTICE]
    needed += [path.name for path in ROOT.glob("*.md")]
    for folder in ("tests", "examples", "benchmarks", "docs"):
        files = (p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".ipynb", ".md", ".c", ".npz", ".yaml"))
        needed += [str(path.relative_to(ROOT)) for path in files]
    assert not set(needed) - in_sdist
    assert not [name for name in in_sdist if name.endswith((".pyc", ".so"))]
    large = [name for name in in_sdist if (ROOT / name).is_file() and (ROOT / name).stat().st_size > 10**6]
    assert large == ["optimum_neuronal/demo/tiny_model/model.safetensors"]


def test_the_wheel_holds_the_package_its_types_and_its_data(packages):
    _, in_wheel, _ = packages
    needed = {"optimum_neuronal/py.typed", "optimum/commands/register/register_neuronal.py", NOTICE}
    files = [p for p in (ROOT / "optimum_neuronal").rglob("*") if p.is_file() and p.parent.name != "__pycache__"]
    needed |= {str(path.relative_to(ROOT)) for path in files if path.suffix not in {".so", ".dll", ".dylib"}}
    assert not needed - in_wheel
    assert not [name for name in in_wheel if not name.startswith(("optimum_neuronal/", "optimum/commands/register/"))]
    assert "optimum/__init__.py" not in in_wheel


def test_the_metadata_names_licences_author_and_addresses(packages):
    *_, metadata = packages
    header = metadata.split("\n\n")[0]
    assert "License-File: LICENSE\n" in header and f"License-File: {NOTICE}\n" in header
    assert "\nLicense-Expression: Apache-2.0 AND PSF-2.0\n" in header
    assert "\nAuthor: " in header and "https://arxiv.org/abs/2411.07066" in header and "Typing :: Typed" in header
    assert f"\nVersion: {VERSION}\n" in header
