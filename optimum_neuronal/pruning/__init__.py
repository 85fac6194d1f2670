"""One prune, from a config to the changes of all weights.

`context.py` checks model and config, and makes the context that every step receives. `prune.py` is the way through: the
calibration data, the top-up's plan, the final pass (`final_pass.py`, `refit.py`), the report (`reporting.py`); then the
weights change.
"""
