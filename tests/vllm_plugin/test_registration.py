import configparser
import logging
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from optimum_neuronal.vllm_plugin import registration


SETUP = Path(__file__).parents[2] / "setup.cfg"


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0"])
def test_other_versions_give_a_warning(caplog, monkeypatch, version):
    """Nothing is registered: models of others still load."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    monkeypatch.setitem(sys.modules, "optimum_neuronal.vllm_plugin.quantization", None)
    with caplog.at_level(logging.WARNING):
        registration.register()
    (record,) = caplog.records
    assert f"with vLLM {version}: it was tested with <0.33,>=0.32. Install such a version" in record.message


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.2.dev3+g1234567"])
def test_tested_versions_are_registered(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    monkeypatch.setitem(sys.modules, "optimum_neuronal.vllm_plugin.quantization", SimpleNamespace())
    monkeypatch.setattr(registration, "get_logger", pytest.fail)
    registration.register()


@pytest.mark.skipif(not SETUP.exists(), reason="the package is installed without its setup.cfg")
def test_vllm_finds_the_entry_point():
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    entry = EntryPoint(*setup["options.entry_points"]["vllm.general_plugins"].split(" = "), "vllm.general_plugins")
    assert entry.name.strip() == "optimum_neuronal" and entry.load() is registration.register
