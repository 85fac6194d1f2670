import os
import subprocess
import sys


def test_optimum_cli_lists_the_commands():
    """The installed plug-in, in a process of its own."""
    command = os.path.join(os.path.dirname(sys.executable), "optimum-cli")
    result = subprocess.run([command, "neuronal", "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("prune", "evaluate", "compare", "inspect", "convert", "speed", "env", "demo"):
        assert name in result.stdout
