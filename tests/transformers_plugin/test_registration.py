import subprocess
import sys

import pytest


CHECK = """
from optimum_neuronal.transformers_plugin import register
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
register()
register()
for method in ("neuronal", "optimum_neuronal"):
    assert method in AUTO_QUANTIZATION_CONFIG_MAPPING and method in AUTO_QUANTIZER_MAPPING
"""


@pytest.mark.parametrize("first", ["", "import transformers", "import optimum.commands.optimum_cli"])
def test_the_import_registers_the_quantizers(first):
    done = subprocess.run([sys.executable, "-c", f"{first}\n{CHECK}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
