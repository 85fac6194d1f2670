import subprocess
import sys

import pytest


CHECK = """
from optimum_neuronal.transformers_plugin import register
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
def is_registered():
    return "neuronal" in AUTO_QUANTIZATION_CONFIG_MAPPING and "neuronal" in AUTO_QUANTIZER_MAPPING
assert is_registered() is {registered}
register()
register()
assert is_registered()
"""


@pytest.mark.parametrize(
    "first, registered",
    [("", True), ("import transformers", True), ("import optimum.commands.optimum_cli", False)],
    ids=["alone", "after transformers", "in optimum-cli"],
)
def test_the_import_registers_the_quantizer_except_in_optimum_cli(first, registered):
    code = f"{first}\n{CHECK.format(registered=registered)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
