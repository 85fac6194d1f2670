"""What is published: the packages, what they hold, and the texts and workflows around them."""

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import make_model

import optimum_neuronal
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup import TOPUPS


ROOT = Path(__file__).parents[1]
VERSION = optimum_neuronal.__version__
NOTICE = "optimum_neuronal/demo/tiny_model/NOTICE"

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="the package is installed without its setup.py"
)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


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
    needed = [
        "constraints.txt",
        "constraints-lowest.txt",
        "Makefile",
        "mkdocs.yml",
        ".ci/run",
        "Dockerfile",
        "CITATION.cff",
        "setup.py",
        NOTICE,
    ]
    needed += [path.name for path in ROOT.glob("*.md")]
    for folder in ("tests", "examples", "benchmarks", "docs"):
        files = (
            path
            for path in (ROOT / folder).rglob("*.*")
            if path.suffix in {".py", ".ipynb", ".md", ".c", ".npz", ".yaml"}
        )
        needed += [str(path.relative_to(ROOT)) for path in files]
    assert "tests/killed_saves.py" in needed and "SECURITY.md" in needed
    assert not set(needed) - in_sdist
    assert not [name for name in in_sdist if name.endswith((".pyc", ".so"))]
    large = [name for name in in_sdist if (ROOT / name).is_file() and (ROOT / name).stat().st_size > 10**6]
    assert large == ["optimum_neuronal/demo/tiny_model/model.safetensors"]


def test_the_wheel_holds_the_package_its_types_and_its_data(packages):
    _, in_wheel, _ = packages
    needed = {"optimum_neuronal/py.typed", "optimum/commands/register/register_neuronal.py", NOTICE}
    needed |= {f"optimum_neuronal/{path.relative_to(ROOT / 'optimum_neuronal')}" for path in files_of_the_package()}
    assert not needed - in_wheel
    assert not [name for name in in_wheel if not name.startswith(("optimum_neuronal/", "optimum/commands/register/"))]
    assert "optimum/__init__.py" not in in_wheel


def files_of_the_package():
    for path in (ROOT / "optimum_neuronal").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".so", ".dll", ".dylib"}:
            yield path


def test_the_metadata_names_licences_author_and_addresses(packages):
    *_, metadata = packages
    header = metadata.split("\n\n")[0]
    assert "License-File: LICENSE\n" in header and f"License-File: {NOTICE}\n" in header
    assert "\nLicense-Expression: Apache-2.0 AND PSF-2.0\n" in header
    assert "\nAuthor: " in header and "https://arxiv.org/abs/2411.07066" in header and "Typing :: Typed" in header
    assert f"\nVersion: {VERSION}\n" in header


def test_the_type_checker_reads_every_public_name():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    read = {name.strip() for name in setup["mypy"]["files"].split(",")}
    for home in set(optimum_neuronal._HOME.values()):
        path = f"optimum_neuronal/{home.replace('.', '/')}"
        assert {f"{path}.py", f"{path}/__init__.py"} & read, f"{home} is not among mypy's files in setup.cfg"
    assert "tests/public_types.py" in read and all((ROOT / name).is_file() for name in read)
    program = ast.parse(text_of("tests/public_types.py"))
    names = {alias.name for node in program.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not set(optimum_neuronal.__all__) - names, "not used by tests/public_types.py"


def test_an_image_is_made_of_what_the_package_needs():
    taken = {line[1:] for line in text_of(".dockerignore").splitlines() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in taken)
    assert {"setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "optimum", "optimum_neuronal"} <= taken
    named = set(re.findall(r"/source/([\w.]+)", text_of("Dockerfile")))
    assert named and named <= taken


def test_one_version_everywhere_and_none_of_development():
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == VERSION
    assert re.findall(r"^## \[(.+?)\]", text_of("CHANGELOG.md"), re.M)[:2] == ["Unreleased", VERSION]


def test_the_paper_is_cited_alike():
    (paper,) = yaml.safe_load(text_of("CITATION.cff"))["references"]
    bibtex = re.search(r"```bibtex\n(.*?)```", text_of("README.md"), re.S).group(1)
    authors = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    for told in (authors, paper["title"], paper["journal"], str(paper["year"]), paper["url"], "arXiv:2411.07066"):
        assert told in bibtex


def test_a_method_in_ten_minutes(ids, monkeypatch):
    """The two of CONTRIBUTING.md, as they are written there."""
    for registry in (SALIENCIES, TOPUPS):
        registry.names()
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    blocks = re.findall(r"^ +```python\n(.*?)^ +```", text_of("CONTRIBUTING.md"), re.M | re.S)
    for number, block in enumerate(blocks):
        name = f"contributing_{number}"
        exec(compile(re.sub("^   ", "", block, flags=re.M), name, "exec"), {"__name__": name})
    config = NeuronALConfig(sparsity=0.5, saliency="gentle:power=0.25", topup="deeper", num_samples=8)
    model = NeuronALPruner(config).prune(make_model("llama"), dataset=ids)
    projections = [f"model.layers.{block}.mlp.up_proj" for block in range(model.config.num_hidden_layers)]
    zeros = [(model.get_submodule(name).weight == 0).double().mean().item() for name in projections]
    assert zeros == sorted(zeros) and zeros[0] < 0.5 < zeros[-1]


def test_what_contributing_names_is_there():
    text = text_of("CONTRIBUTING.md")
    targets = set(re.findall(r"^make ([a-z-]+)", text, re.M))
    assert targets <= set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.M))
    rooms = {path.name for path in (ROOT / "optimum_neuronal").iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(re.findall(r"`(\w+)/`", text.split("How a prune passes")[0])) - {"optimum_neuronal"}
    for path in re.findall(r"`((?:tests|examples|benchmarks|docs|optimum_neuronal)/[\w/]*(?:\.py)?)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / path).exists(), path


def test_workflows_run_what_a_change_must_pass_and_publish_without_a_token():
    if not (ROOT / ".github").exists():
        pytest.skip("an sdist has no workflows")
    for path in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path.name
    ci, release = (yaml.safe_load(text_of(f".github/workflows/{name}.yml"))["jobs"] for name in ("ci", "release"))
    assert {"run": ".ci/run"} in ci["all"]["steps"] and {"run": ".ci/run"} in release["build"]["steps"]
    assert {"run": "make docs"} in yaml.safe_load(text_of(".github/workflows/ci.yml"))["jobs"]["docs"]["steps"]
    assert {"run": "make dist"} in release["build"]["steps"] and release["publish"]["needs"] == "build"
    assert release["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in text_of(".github/workflows/release.yml")
