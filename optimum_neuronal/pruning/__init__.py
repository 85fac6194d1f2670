"""One prune, from a config to what becomes of every weight.

`context.py` checks a model and a config before any work, and makes the context that every step takes. `prune.py` is the
way through: the search, the final pass (`final_pass.py`, `refit.py`, `quantising.py`), the report (`reporting.py`); then
the weights change. This room knows configs, methods, trials and the engine.
"""
