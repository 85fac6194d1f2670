"""The documentation agrees with the code: links, public names, methods, fields and promises."""

import ast
import csv
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass

import pytest
from markdown_files import DOCS, ROOT, TEXTS, anchors, blocks, links, name_of

import optimum_neuronal
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.config.config_fields import explain
from optimum_neuronal.config.presets import PRESETS
from optimum_neuronal.saliency import SALIENCIES, Saliency, WeightUpdate
from optimum_neuronal.topup import TOPUPS, TopUp
from optimum_neuronal.topup.neuronal import LAMBDAS


pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the package is installed without its documentation")
METHODS = [(registry, name) for registry in (SALIENCIES, TOPUPS) for name in registry.names()]


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_links_lead_somewhere(path):
    for target, anchor in links(path):
        file = (path.parent / target).resolve() if target else path
        assert file.is_relative_to(ROOT.resolve()) and file.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(file), f"{target} has no heading #{anchor}"


def test_the_reference_has_every_public_name():
    reference = (DOCS / "reference.md").read_text()
    for name in optimum_neuronal.__all__:
        assert name in reference or name == "__version__", name


def callables() -> Iterator[tuple[str, Callable]]:
    """Yield the functions and methods that users call, by name. Dataclasses have tables of their fields instead."""
    for name in optimum_neuronal.__all__:
        if callable(owner := getattr(optimum_neuronal, name)) and not is_dataclass(owner):
            yield name, owner
    for owner in (NeuronALConfig, NeuronALPruner):
        for name, method in vars(owner).items():
            if not name.startswith("_") and (inspect.isfunction(method) or isinstance(method, classmethod)):
                yield f"{owner.__name__}.{name}", getattr(owner, name)
    yield from (("Saliency.score", Saliency.score), ("WeightUpdate.solve", WeightUpdate.solve))
    yield "TopUp.allocate", TopUp.allocate


def signature(function: Callable) -> str:
    """Return a signature without self and without types, which the docstrings describe."""
    found = inspect.signature(function)
    own = [p.replace(annotation=p.empty) for name, p in found.parameters.items() if name != "self"]
    return str(found.replace(parameters=own, return_annotation=found.empty))


def test_the_reference_has_every_signature():
    code = "".join(block.code for block in blocks(DOCS / "reference.md") if block.language == "py")
    code = " ".join(code.split()).replace("( ", "(").replace(", )", ")")  # one line each, as Python writes them
    for name, function in callables():
        assert f"{name}{signature(function)}" in code, name


def test_the_reference_has_every_field_with_its_default():
    reference = (DOCS / "reference.md").read_text()
    for entry in fields(NeuronALConfig):
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        shown = "required" if default is MISSING else f"`{default!r}`"
        assert f"| `{entry.name}` | {shown} | {explain(entry)} |\n" in reference, entry.name


def test_the_reference_has_every_preset_with_its_fields():
    reference = (DOCS / "reference.md").read_text()
    for name, values in PRESETS.items():
        assert f"| `{name}` | `{', '.join(f'{key}={value!r}' for key, value in values.items())}` | " in reference, name


@pytest.mark.parametrize("registry, name", METHODS)
def test_every_method_has_its_paragraph_and_defaults(registry, name):
    page = (DOCS / "methods.md").read_text()
    _, found, rest = page.partition(f"\n### {name}\n")
    assert found and f"[`{name}`](#{name})" in page
    for entry in fields(registry.get(name)):
        if not entry.name.endswith("_lambdas"):  # the paper's long lists
            assert re.search(rf"`{entry.name}={re.escape(repr(entry.default))}`", rest.partition("\n### ")[0]), (
                entry.name
            )


def test_every_promise_names_tests_that_exist():
    rows = re.findall(r"^\| \*\*.+$", (DOCS / "promises.md").read_text(), re.M)
    assert 10 <= len(rows) <= 15
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text())
            assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (path, name)


def test_published_lambdas_are_candidates():
    with (DOCS / "paper_lambdas.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 78  # 12 settings of five models and 9 of two
    for row in rows:
        assert row["saliency"] in SALIENCIES.names() and row["sparsity"] in ("0.6", "0.7", "0.8")
        assert float(row["block_lambda"]) in LAMBDAS
        assert row["saliency"] == "sparsegpt" if not row["row_lambda"] else float(row["row_lambda"]) in (0.0, *LAMBDAS)
