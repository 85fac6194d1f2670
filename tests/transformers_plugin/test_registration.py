import os
import subprocess
import sys

import pytest
from profiles import at_night


BEGIN = """
import importlib, importlib.util, sys
import optimum_neuronal
from optimum_neuronal.transformers_plugin import registration
NAME = "transformers.quantizers.auto"
def finders():
    return [finder for finder in sys.meta_path if isinstance(finder, registration._Finder)]
assert len(finders()) == 1
"""
LOOKED_FOR = """
for _ in range(3):
    spec = importlib.util.find_spec(NAME)
    assert spec.origin.endswith("auto.py") and NAME not in sys.modules and len(finders()) == 1
assert "register_quantizer" in spec.loader.get_source(NAME)
"""
REGISTERED = """
from transformers.quantizers import auto
assert "neuronal" in auto.QUANTIZERS and "neuronal" in auto.CONFIGS and not finders()
assert type(auto.__loader__).__name__ == type(auto.__spec__.loader).__name__ == "SourceFileLoader"
optimum_neuronal.transformers_plugin.registration.register()
assert not finders()
"""
FAILS = """
try:
    importlib.import_module(NAME)
except OSError as error:
    assert "the disk was busy" in str(error)
else:
    raise SystemExit("it was imported")
assert NAME not in sys.modules and len(finders()) == 1
"""
ELSEWHERE = """
spec = importlib.util.find_spec(NAME)
copy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(copy)  # a module of its own, which nobody else sees
assert "neuronal" not in copy.QUANTIZERS and len(finders()) == 1
"""
ANOTHER_FINDER = """
class Another:
    def find_spec(self, name, path=None, target=None):
        if name == NAME:
            behind = sys.meta_path[sys.meta_path.index(self) + 1:]
            return next(filter(None, (finder.find_spec(name, path, target) for finder in behind)), None)
class Old: pass
sys.meta_path.insert(0, Another())
sys.meta_path.append(Another())
sys.meta_path.append(Old())
"""
ABSENT = """
import transformers
from pathlib import Path
Path(transformers.__file__).with_name("quantizers").joinpath("auto.py").unlink()
assert importlib.util.find_spec(NAME) is None
"""
THREADS = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    specs = list(pool.map(importlib.util.find_spec, [NAME] * 50))
    modules = set(pool.map(importlib.import_module, [NAME] * 8))
assert all(specs) and len(modules) == 1 and len(sys.executed) == 1
"""


IN_TRANSFORMERS = """
import sys
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
assert "neuronal" in AUTO_QUANTIZER_MAPPING and "neuronal" in AUTO_QUANTIZATION_CONFIG_MAPPING
assert not any(type(finder).__module__.startswith("optimum_neuronal") for finder in sys.meta_path)
"""


def run(code, *arguments, path=""):
    paths = [str(path), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize(
    "code",
    [REGISTERED, LOOKED_FOR + REGISTERED, ELSEWHERE + REGISTERED, ANOTHER_FINDER + LOOKED_FOR + REGISTERED, ABSENT, THREADS + REGISTERED],
    ids=["imported", "looked for", "executed elsewhere", "another finder", "absent", "threads"],
)  # fmt: skip
def test_the_quantizer_is_registered_when_the_list_is_executed(lazy, code):
    run(BEGIN + code, path=lazy)


def test_a_failed_import_can_be_repeated(lazy):
    run(BEGIN + LOOKED_FOR + FAILS + REGISTERED, "fails", path=lazy)


@at_night
@pytest.mark.parametrize(
    "first",
    [
        "importlib.util.find_spec('transformers.quantizers.auto')",
        "importlib.import_module('transformers.quantizers.auto')",
    ],
)
def test_in_transformers(first):
    """Somebody looks for the list, or imports it, before this package. `test_memory` imports this package first."""
    run(f"import importlib.util\n{first}\nimport optimum_neuronal\n{first}\n{IN_TRANSFORMERS}")
