"""Methods of the user's own on the command line."""

import json
import sys

import pytest

from optimum_neuronal.saliency import SALIENCIES


METHOD = """
from dataclasses import dataclass
from optimum_neuronal import register_saliency
from optimum_neuronal.saliency import Saliency

@register_saliency("own_{name}")
@dataclass(frozen=True)
class Own(Saliency):
    power: float = 0.5

    def score(self, weight, activation):
        return weight.abs() * activation**self.power
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module with a method into the working directory, and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    SALIENCIES.names()
    monkeypatch.setattr(SALIENCIES, "_classes", dict(SALIENCIES._classes))  # other tests list the methods

    def write(name):
        (tmp_path / f"{name}.py").write_text(METHOD.replace("{name}", name))
        return name

    return write


def test_prune_and_compare_with_a_module_and_the_card_names_it(run, dense, module, tmp_path):
    name, text = module("methods_a"), tmp_path / "text.txt"
    given = ("--model", dense, "--dataset", text, "--num-samples", 8, "--num-alignment-samples", 2, "--seq-length", 16)
    own = ("--import", name, "--saliency", f"own_{name}:power=1.0", "--topup", "uniform", "--sparsity", 0.5)
    run("prune", *given, *own, "--output", tmp_path / "out")
    assert f"--import {name}" in (tmp_path / "out" / "README.md").read_text()
    report = json.loads((tmp_path / "out" / "neuronal_report.json").read_text())
    assert report["method"] == f"own_{name}, power=1.0 + uniform"
    other = module("methods_c")  # which is not imported yet
    own = ("--import", other, "--saliency", f"own_{other}:power=1.0", "--topup", "uniform", "--sparsity", 0.5)
    shown = run("compare", *given, *own, "--evaluate", text, "--max-windows", 2, "--output", tmp_path / "table")
    assert f"own_{other}, power=1.0" in shown
