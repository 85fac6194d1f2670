import re

import pytest

from optimum_neuronal.native import environment, library
from optimum_neuronal.native.build import BuildError


@pytest.fixture
def asked_anew(monkeypatch):
    """The kernels are chosen when they are first asked for: here once more, and again afterwards."""
    library.find_kernel.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    library.find_kernel.cache_clear()


@pytest.mark.parametrize("name, found", [("torch", "torch"), ("mmx", ".*'mmx': expected one of")])
def test_a_kernel_may_be_forced(name, found, asked_anew):
    asked_anew.setenv(library.VARIABLE, name)
    assert re.match(found, environment.describe_environment()["kernel in use"])


def test_why_there_are_no_kernels(asked_anew):
    for module in (environment, library):
        asked_anew.setattr(module, "find_library", lambda: BuildError("no C compiler was found"))
    found = environment.describe_environment()
    assert found["kernels that run here"] == "none: no C compiler was found"
    assert found["kernel in use"].startswith("torch") and found["kernels compiled with threads"] is False


def test_a_processor_has_a_name():
    assert environment.processor_name()
