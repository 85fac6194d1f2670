from dataclasses import fields

from optimum_neuronal.config_fields import ALIASES
from optimum_neuronal.topup import TOPUPS


def test_the_table_tells_the_topups_own_hyper_parameters():
    for name, alias in ALIASES.items():
        for topup in alias.topups:
            own = {entry.name: entry.default for entry in fields(TOPUPS.get(topup))}
            assert own[name] == alias.default
