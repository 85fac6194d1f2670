import pytest

from optimum_neuronal.native import environment, library
from optimum_neuronal.native.build import BuildError


@pytest.fixture
def asked_anew(monkeypatch):
    """The kernels are chosen when first used: here once more, and again afterwards."""
    library.find_kernel.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    library.find_kernel.cache_clear()


def test_why_there_are_no_kernels(asked_anew):
    for module in (environment, library):
        asked_anew.setattr(module, "find_library", lambda: BuildError("no C compiler was found"))
    described = environment.describe_environment()
    assert described["kernels that run here"] == "none: no C compiler was found"
    assert described["kernel in use"].startswith("torch") and described["kernels compiled with threads"] is False
