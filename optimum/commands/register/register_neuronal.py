"""Adds `neuronal` to `optimum-cli`, which imports every module of this folder, whichever distribution it came with.

No folder under `optimum/` may hold an `__init__.py`: it would hide optimum's own modules.
"""

from optimum_neuronal.cli.neuronal_command import NeuronalCommand


REGISTER_COMMANDS = [NeuronalCommand]
