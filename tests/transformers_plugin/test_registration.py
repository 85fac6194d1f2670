import subprocess
import sys

import pytest


CHECK = """
import optimum_neuronal
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
assert {"neuronal", "optimum_neuronal"} <= AUTO_QUANTIZATION_CONFIG_MAPPING.keys() & AUTO_QUANTIZER_MAPPING.keys()
optimum_neuronal.transformers_plugin.register()  # again
"""


@pytest.mark.parametrize("first", ["", "import transformers", "import optimum.commands.optimum_cli"])
def test_the_import_registers_the_quantizers(first):
    done = subprocess.run([sys.executable, "-c", f"{first}\n{CHECK}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
